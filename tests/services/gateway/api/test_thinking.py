"""Tests of thinking apart from the answer: by the marks in its text, in each API."""

from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.api.thinking import ThinkingReader
from shared.schemas import Thinking
from tests.services.gateway.site import Site, replies_in, sse

BEGUN, MARKED = Thinking(end="</think>", begun=True), Thinking(end="</think>", begun=False)
FIRM = Thinking(end="[/THINK]", begun=False)
# the whole text of an output, and its two parts
OUTPUTS = [
    (BEGUN, "Hm.\n\nWell.\n</think>\n\nIt flows. ", "Hm.\n\nWell.", "It flows. "),
    (BEGUN, "\nHm.", "Hm.", ""),
    (BEGUN, "Is 1 < 2? </thin>", "Is 1 < 2? </thin>", ""),
    (MARKED, "<think>\nHm.\n</think>\n\nIt flows.", "Hm.", "It flows."),
    (MARKED, "\n<think>\n\n</think>\n\nIt flows.", "", "It flows."),
    (MARKED, " It <think>flows</think>.", "", " It <think>flows</think>."),
    (MARKED, "<thi", "", "<thi"),
    (MARKED, "<think>", "", ""),
    (FIRM, "[THINK]Hm.[/THINK]It flows.", "Hm.", "It flows."),
]


@given(chosen=st.sampled_from(OUTPUTS), sizes=st.lists(st.integers(1, 9), max_size=60))
@example(chosen=OUTPUTS[0], sizes=[1] * 60)
def test_thinking_ends_at_its_mark_however_the_text_is_cut(
    chosen: tuple[Thinking, str, str, str], sizes: list[int]
) -> None:
    thinking, text, thought, said = chosen
    reader, parts = ThinkingReader(thinking), []
    for size in sizes:
        parts.append(reader.feed(text[:size]))
        text = text[size:]
    parts += [reader.feed(text), reader.finish()]
    assert ("".join(p[0] for p in parts).rstrip(), "".join(p[1] for p in parts)) == (thought, said)


WORDS = ["\n", "Hm.", "\n", "</think>", "\n\n", "It", " flows."]
TALK: list[Any] = [{"role": "user", "content": "What is a river?"}]


@pytest.fixture
async def thinker(at: Site) -> Site:
    at.fleet.says, at.fleet.thinking = WORDS, BEGUN
    return at


async def test_a_chat_has_it_as_reasoning_content(thinker: Site) -> None:
    whole = (await thinker.post("chat/completions", {"messages": TALK})).json()
    (choice,) = whole["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "It flows.", "refusal": None, "reasoning_content": "Hm.",
    }  # fmt: skip
    asked = {"messages": TALK, "stream": True, "return_token_ids": True}
    chunks = replies_in(await thinker.post("chat/completions", asked))
    deltas = [chunk["choices"][0] for chunk in chunks]
    for name, text in (("reasoning_content", "Hm."), ("content", "It flows.")):
        assert "".join(one["delta"].get(name, "") for one in deltas) == text
    tokens = [token for one in deltas for token in one.get("token_ids", ())]
    assert tokens == list(range(len(WORDS))), "none is lost at the marks"


async def test_an_answer_cut_off_within_it_has_nothing_else(thinker: Site) -> None:
    asked = {"messages": TALK, "max_tokens": 2}
    (choice,) = (await thinker.post("chat/completions", asked)).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "Hm.")
    assert choice["finish_reason"] == "length"


async def test_a_response_has_it_as_an_item_that_may_come_back(thinker: Site) -> None:
    whole = (await thinker.post("responses", {"input": "What is a river?"})).json()
    events = sse((await thinker.post("responses", {"input": "x", "stream": True})).text)
    for response in (whole, events[-1]["response"]):
        thought, said = response["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert (thought["type"], thought["summary"]) == ("reasoning", [])
        assert said["content"][0]["text"] == "It flows."
        assert response["completed_at"] >= response["created_at"]
    kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
    assert kinds == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    asked = {"input": [*TALK, *whole["output"], {"role": "user", "content": "And a lake?"}]}
    assert (await thinker.post("responses", asked, key := "again")).status_code == 200
    assert thinker.request(key).messages == [
        *TALK,
        {"role": "assistant", "content": "It flows.", "reasoning_content": "Hm."},
        {"role": "user", "content": "And a lake?"},
    ]
