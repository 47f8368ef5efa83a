"""Tests of the gateway's answers, whole and streamed: they have the form of OpenAI's API."""

from typing import Any

import openai
import pytest

from services.gateway.api.translate import id_of_choice
from tests.services.gateway.site import Site, key_of, new_id, replies_in, sse, until
from tests.services.gateway.standin_fleet import MODEL

CHAT: list[Any] = [{"role": "user", "content": "hi"}]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_openai_client_gets_a_completion_whole_and_streamed(at: Site) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 3}
    async with at.openai() as client:
        answer = await client.completions.create(prompt="one two three", **asked)
        stream = await client.completions.create(prompt=[1, 2, 3], **asked, **WITH_USAGE)
        chunks = [chunk async for chunk in stream]
    assert answer.choices[0].text == " w0 w1 w2"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert (answer.model_extra or {})["service_tier"] == "default"
    texts = [(c.choices[0].text, c.choices[0].finish_reason) for c in chunks if c.choices]
    assert texts == [(" w0", None), (" w1", None), (" w2", None), ("", "length")]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_chat_is_answered_whole_in_the_words_of_openai(at: Site) -> None:
    key = new_id()
    answer = await at.post("chat/completions", {"messages": CHAT, "max_tokens": 2}, key)
    assert answer.headers["x-request-id"] == key
    body = answer.json()
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": f"chatcmpl-{key}",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " w0 w1", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "service_tier": "default",
        "usage": usage(3, 2),
    }


async def test_a_chat_streams_its_role_then_words_then_the_end_then_usage(at: Site) -> None:
    asked = {"messages": CHAT, "max_tokens": 2} | WITH_USAGE
    events = replies_in(await at.post("chat/completions", asked))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    role, first, second, end, last = [event["choices"] for event in events]
    begun = {"role": "assistant", "content": "", "refusal": None}
    assert role == [{"index": 0, "delta": begun, "logprobs": None, "finish_reason": None}]
    for chunk, text in ((first, " w0"), (second, " w1")):
        delta = {"content": text}
        assert chunk == [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]
    assert end == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert last == []
    assert [event["usage"] for event in events] == [None] * 4 + [usage(3, 2)]


async def test_usage_so_far_comes_with_every_chunk_if_wanted(at: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "b"], "max_tokens": 3, "stream": True, "stream_options": options}
    events = replies_in(await at.post("completions", body))
    made = [
        event["usage"]["completion_tokens"]
        for event in events
        if event["choices"] and event["choices"][0]["text"]
    ]
    assert made == [1, 2, 3, 4, 5, 6]
    assert {event["usage"]["prompt_tokens"] for event in events} == {6}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_written_as_each_api_has_them(at: Site, stream: bool) -> None:
    async def told(path: str, **asked: Any) -> list[Any]:
        replies = replies_in(await at.post(path, {"max_tokens": 2, "stream": stream, **asked}))
        return [c["logprobs"] for reply in replies for c in reply["choices"] if c["logprobs"]]

    half = {"token": "bytes:\\xe2\\x80", "bytes": [0xE2, 0x80], "logprob": -0.25}
    whole = {"token": "\u00e9", "bytes": [0xC3, 0xA9], "logprob": -9999.0}
    found = await told("chat/completions", messages=CHAT, logprobs=True, top_logprobs=2)
    assert [entry for one in found for entry in one["content"]] == [
        {
            "token": f" w{n}",
            "bytes": list(f" w{n}".encode()),
            "logprob": -0.5 - n,
            "top_logprobs": [half, whole],
        }
        for n in range(2)
    ]
    found = await told("completions", prompt="hi", logprobs=1)
    assert {name: [value for one in found for value in one[name]] for name in found[0]} == {
        "tokens": [" w0", " w1"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [
            {"bytes:\\xe2\\x80": -0.25, " w0": -0.5},
            {"bytes:\\xe2\\x80": -0.25, " w1": -1.5},
        ],
        "text_offset": [0, 3],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_no_reader_of_lines_breaks_an_answer(at: Site, stream: bool) -> None:
    """Every character that Python and httpx take for the end of a line is escaped."""
    text = "a\u2028b\u2029c\u0085d\u00e9"
    body = {"prompt": text, "echo": True, "max_tokens": 1, "stream": stream}
    answer = await at.post("completions", body)
    assert (answer.text.splitlines() == answer.text.split("\n")[:-1]) == stream
    texts = [event["choices"][0]["text"] for event in replies_in(answer)]
    assert "".join(texts) == f"{text} w0"
    refused = await at.client.get(f"/v1/models/{text}")
    assert len(refused.text.splitlines()) == 1


# ---------------------------------------------------------------- choices


async def test_several_prompts_and_choices_are_several_requests_with_ids_and_seeds_of_their_own(
    at: Site,
) -> None:
    key, long_id = new_id(), "x" * 64
    body = {"prompt": ["one", "two"], "n": 2, "seed": 2**63 - 1, "max_tokens": 3, "echo": True}
    answer = (await at.post("completions", body, key)).json()
    texts = [f"{prompt} w0 w1 w2" for prompt in ("one", "one", "two", "two")]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(texts))
    assert answer["usage"] == usage(6, 12)
    requests = [at.request(id_of_choice(key, i)) for i in range(4)]
    assert {r.choices for r in requests} == {4}  # fewer or more under the key are a conflict
    assert [(r.prompt, r.sampling.seed) for r in requests] == [
        (p, s) for p in ("one", "two") for s in (2**63 - 1, -(2**63))
    ]
    again = (await at.post("completions", body, key)).json()
    assert again["choices"] == answer["choices"]
    assert len(at.fleet.asked) == 4
    for _ in range(2):
        answer = (await at.post("completions", {"prompt": [[1], [2, 3]]}, long_id)).json()
        assert answer["id"] == f"cmpl-{long_id}"
    assert len(at.fleet.asked) == 6


async def test_choices_stream_side_by_side_each_complete_under_its_index(at: Site) -> None:
    body = {"messages": CHAT, "n": 16, "max_tokens": 20} | WITH_USAGE
    *events, last = replies_in(await at.post("chat/completions", body))
    assert last["usage"] == usage(3, 320)
    streamed: dict[int, list[Any]] = {}
    for event in events:
        (choice,) = event["choices"]
        streamed.setdefault(choice["index"], []).append(choice)
    assert sorted(streamed) == list(range(16))
    whole = "".join(f" w{n}" for n in range(20))
    for chunks in streamed.values():
        assert chunks[0]["delta"]["role"] == "assistant"
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * 21 + ["length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("others", "last", "status", "code"),
    [
        ("wait", "refuse slow_down", 429, "slow_down"),
        ("wait", "end refused", 429, "slow_down"),
        ("hang", "break", 500, "server_error"),
    ],
)
async def test_if_one_choice_is_refused_or_fails_that_is_the_answer_and_the_others_are_cancelled(
    at: Site, stream: bool, others: str, last: str, status: int, code: str
) -> None:
    key = new_id()
    answer = await at.post("completions", {"prompt": [others, others, last], "stream": stream}, key)
    begun = stream and last == "break"
    assert answer.status_code == (200 if begun else status)
    error = (sse(answer.text)[-1] if begun else answer.json())["error"]
    assert error["code"] == code
    await until(lambda: set(at.fleet.cancels) == {key_of(id_of_choice(key, n)) for n in range(2)})


# ---------------------------------------------------------------- errors

BAD_ENDS: list[tuple[str, type[openai.APIStatusError], int, str]] = [
    ("refuse permission_denied", openai.PermissionDeniedError, 403, "permission_denied"),
    ("refuse model_not_found", openai.NotFoundError, 404, "model_not_found"),
    ("refuse context_length_exceeded", openai.BadRequestError, 400, "context_length_exceeded"),
    ("refuse slow_down", openai.RateLimitError, 429, "slow_down"),
    ("refuse rate_limit_exceeded", openai.RateLimitError, 429, "rate_limit_exceeded"),
    ("refuse something_new", openai.BadRequestError, 400, "something_new"),
    ("end refused", openai.RateLimitError, 429, "slow_down"),
    ("end dropped", openai.RateLimitError, 429, "slow_down"),
    ("end failed", openai.InternalServerError, 500, "server_error"),
    ("end invalid", openai.BadRequestError, 400, "unsupported_parameter"),
    ("end expired", openai.InternalServerError, 504, "request_expired"),
    ("end cancelled", openai.APIStatusError, 499, "request_cancelled"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_refusal_and_bad_end_is_an_openai_error(at: Site, stream: bool) -> None:
    async with at.openai() as client:
        for prompt, kind, status, code in BAD_ENDS:
            with pytest.raises(kind) as caught:
                await client.completions.create(model=MODEL, prompt=prompt, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (status, code), prompt
            headers = caught.value.response.headers
            assert ("retry-after" in headers) == (status == 429), prompt
            if status == 429:
                assert headers["retry-after"] == ("3" if prompt.startswith("refuse") else "30")
                dropped = headers["x-llm-d-request-dropped-reason"]
                if code == "rate_limit_exceeded":
                    assert dropped == "rejected-rate-limited"
                else:
                    assert dropped in ("rejected-saturated", "evicted-queue-pressure")
    flex = await at.post("completions", {"prompt": "end refused", "service_tier": "flex"})
    assert (flex.status_code, flex.json()["error"]["code"]) == (429, "resource_unavailable")
