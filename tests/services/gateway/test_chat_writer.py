"""Tests of the writer of chat answers: a streamed choice adds up to the one that is sent whole."""

from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.api.api_format import Output
from services.gateway.api.chats import ChatChoiceWriter, ChatFormat
from services.gateway.api.tools.definitions import Calls, Function
from shared.schemas import Delta, Likelihood, Thinking, TokenLogprob

ENDS = Thinking(end="</think>", begun=True)
PARTS = [
    "<think>", "</think>", "<th", "ink>",
    "Hm. ", "\n", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "}"}}', "[", "]",
    '{"name": "f"', "[TOOL_CALLS]", "f[ARGS]{}", "```json", "é\u2028",
]  # fmt: skip
CALL = ['<tool_call>{"name": "f", "arg', 'uments": {}}', "</tool_call>", "\n"]


def writer(
    form: str, thinking: Thinking | None, *, parallel: bool, likely: bool, tokens: bool
) -> ChatChoiceWriter:
    calls = Calls([Function(name="f")], False, "", parallel)
    chat = ChatFormat(calls, held=False, logprobs=likely, token_ids=tokens)
    return chat.writer(0, "r", form, thinking)


def assembled(chunks: list[Any]) -> dict[str, Any]:
    """The choice that a client puts together of its chunks."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    found: dict[str, Any] = {"message": message, "logprobs": [], "token_ids": []}
    for chunk in msgspec.to_builtins(chunks):
        delta = chunk["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        if "role" in delta:
            message["role"] = delta["role"]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part.pop("index") == len(message["tool_calls"])
                message["tool_calls"].append(part)
            else:
                function = message["tool_calls"][part["index"]]["function"]
                function["arguments"] += part["function"]["arguments"]
        found["logprobs"] += (chunk["logprobs"] or {}).get("content", [])
        found["token_ids"] += chunk.get("token_ids", [])
        found["finish_reason"] = chunk["finish_reason"]
    return found


@given(
    texts=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12),
    form=st.sampled_from(["hermes", "mistral", ""]),
    thinking=st.sampled_from([None, ENDS, Thinking(end="</think>", begun=False)]),
    reason=st.sampled_from(["stop", "length"]),
    parallel=st.booleans(),
    likely=st.booleans(),
    tokens=st.booleans(),
)
@example(["[", "[", '{"name": "f", "arguments": {}}'], "", None, "stop", True, False, False)
@example(CALL, "hermes", None, "stop", True, True, False)
@example(["Hm", "\n", "</think>", "\n", *CALL], "hermes", ENDS, "stop", True, True, True)
def test_whole_and_streamed_a_choice_is_the_same(
    texts: list[str],
    form: str,
    thinking: Thinking | None,
    reason: str,
    parallel: bool,
    likely: bool,
    tokens: bool,
) -> None:
    output, options = Output(), {"parallel": parallel, "likely": likely, "tokens": tokens}
    streamed = writer(form, thinking, **options)
    chunks = [*streamed.open()]
    for n, text in enumerate(texts):
        logprobs = [TokenLogprob(Likelihood(n, text.encode(), -1.0))] if likely else []
        delta = Delta(attempt=1, offset=n, tokens=[n], text=text, text_offset=0, logprobs=logprobs)
        output.take(delta)
        chunks += streamed.say(delta)
    chunks += streamed.close(reason)
    whole = msgspec.to_builtins(writer(form, thinking, **options).whole(output, reason))
    message = whole["message"]
    assert assembled(chunks) == {
        "message": {
            "role": message["role"],
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content", ""),
            "tool_calls": message.get("tool_calls", []),
        },
        "logprobs": (whole["logprobs"] or {}).get("content", []),
        "token_ids": whole.get("token_ids", []),
        "finish_reason": whole["finish_reason"],
    }
