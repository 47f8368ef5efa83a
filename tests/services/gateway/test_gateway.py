"""Tests of the gateway as a service: its limits, what it cancels, its health, and how it stops."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from services.gateway.api.translate import id_of_choice
from tests.services.gateway.site import (
    WITHIN_S,
    Site,
    client_of,
    gateway,
    key_of,
    new_id,
    site,
    sse,
    until,
    until_status,
)
from tests.services.gateway.standin_fleet import FLOOD_WORD, MODEL

IDLE = "slackline_gateway_unfinished_requests 0"


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("n", [1, 3])
async def test_without_admission_the_answer_is_503_and_says_that_there_is_no_endpoint(
    nats_url: str, n: int
) -> None:
    async with gateway(nats_url, submit_s=0.3) as (url, _, _), client_of(url) as http:
        answer = await http.post("/v1/completions", json={"prompt": "hello", "n": n})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_is_overloaded"
    assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    assert answer.headers["retry-after"] == "1"


async def test_a_body_that_trickles_in_is_given_up(nats_url: str) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        await at.until_metrics('slackline_gateway_responses_total{status="400"} 1')

    async with site(nats_url, body_within_s=0.1) as at, at.http() as http:
        answer = await http.post("/v1/completions", content=trickle())
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_timeout")


async def test_over_the_limit_of_unfinished_choices_a_new_one_is_refused_with_slow_down(
    nats_url: str,
) -> None:
    async with site(nats_url, requests_limit=3) as at:
        assert (await at.post("completions", {"prompt": "hi", "n": 4})).status_code == 429
        async with at.stream("completions", {"prompt": "hang", "n": 3}):
            answer = await at.post("completions", {"prompt": "hi"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "slow_down")
            assert answer.headers["retry-after"] == "1"
        await until(lambda: len(at.fleet.cancels) == 3)
        await at.until_metrics(IDLE)
        assert (await at.post("completions", {"prompt": "hi", "n": 3})).status_code == 200


@pytest.mark.parametrize("size", [100_001, 2_000_000])
async def test_a_body_over_the_limit_is_413_and_the_sender_hears_it(
    nats_url: str, size: int
) -> None:
    async with site(nats_url, body_limit_bytes=100_000) as at:
        answer = await at.post("completions", b"x" * size)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (413, "request_too_large")
        assert error["message"] == "the body has more than 100,000 bytes"
        copies = {"prompt": "x" * 20_000, "n": 5}
        answer = await at.post("completions", copies)
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "n")
        assert (await at.post("completions", copies | {"n": 4})).status_code == 200


# ---------------------------------------------------------------- hanging up


async def test_a_request_whose_answer_was_lost_is_withdrawn_unless_its_client_knows_its_id(
    nats_url: str,
) -> None:
    async with site(nats_url, submit_s=0.5) as at:
        known = new_id()
        for prompt in ("silent", "refuse server_is_overloaded"):
            for key in (known, None):
                answer = await at.post("completions", {"prompt": prompt}, key)
                assert answer.status_code == 503
            made_up = key_of(answer.headers["x-request-id"])
            await until(lambda: made_up in at.fleet.cancels)  # noqa: B023 - called at once
        assert key_of(known) not in at.fleet.cancels


async def test_a_client_that_hangs_up_cancels_all_its_choices(at: Site) -> None:
    streamed, whole = new_id(), new_id()
    hang = {"messages": [{"role": "user", "content": "hang"}], "n": 3}
    async with at.stream("chat/completions", hang, streamed) as answer:
        _ = [line async for line in _through(answer.aiter_lines(), "data: ")]
        assert at.fleet.cancels == {}
    choices = {key_of(id_of_choice(streamed, n)) for n in range(3)}
    await until(lambda: set(at.fleet.cancels) == choices)
    waiting = asyncio.create_task(at.post("completions", {"prompt": "hang"}, whole))
    await until(lambda: key_of(whole) in at.fleet.asked)
    waiting.cancel()
    await until(lambda: key_of(whole) in at.fleet.cancels)
    await at.until_metrics("slackline_gateway_hung_up_total 2")


async def test_a_slow_reader_gets_every_token_though_more_than_the_queue_holds_were_made(
    at: Site,
) -> None:
    count = 6000  # 6 MB of text: over what the sockets and the handle's 1024 events hold
    key = new_id()
    async with at.stream("completions", {"prompt": "flood", "max_tokens": count}, key) as answer:
        # nothing read until it has ended
        await until(lambda: at.fleet.asked[key_of(key)].verdict is not None)
        events = sse("".join([part async for part in answer.aiter_text()]))
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == FLOOD_WORD * count
    assert at.fleet.attaches > 0


async def test_a_reader_that_reads_nothing_for_too_long_has_hung_up(nats_url: str) -> None:
    key = new_id()
    async with (
        site(nats_url, stall_s=0.3) as at,
        at.stream("completions", {"prompt": "flood", "max_tokens": 12_000}, key),
    ):
        await until(lambda: key_of(key) in at.fleet.cancels)


async def test_a_silent_stream_is_kept_alive_by_comments(nats_url: str) -> None:
    lines: list[str] = []
    async with (
        site(nats_url, keepalive_s=0.05) as at,
        at.stream("completions", {"prompt": "wait", "max_tokens": 1}) as answer,
    ):
        async for line in answer.aiter_lines():
            lines.append(line)
            if sum(line.startswith(":") for line in lines) == 2:
                at.fleet.go.set()
    assert [event["choices"][0]["text"] for event in sse("\n".join(lines))[:-1]] == [" w0", ""]
    assert lines[0].startswith(":")


# ---------------------------------------------------------------- models, readiness and metrics


async def test_health_readiness_models_and_unknown_paths(nats_url: str) -> None:
    async with gateway(nats_url) as (url, _, _), client_of(url) as http:
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}
        assert "no replica has been heard of" in (await http.get("/v1/models/no/such")).text
    async with site(nats_url) as at, at.openai() as client:
        http = at.client
        assert (await http.get("/ready")).status_code == 200
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        unknown = f"unknown model `no/such`; this fleet serves `{MODEL}`"
        with pytest.raises(openai.NotFoundError, match=unknown):
            await client.models.retrieve("no/such")
        asked = await http.post("/tokenize", json={"model": "no/such", "prompt": "hi"})
        assert (asked.status_code, asked.json()["error"]["message"]) == (404, unknown)
        assert (await http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        for method, path in (("POST", "chat/completions"), ("GET", "files/f")):
            message = (await http.request(method, f"/{path}")).json()["error"]["message"]
            assert message.endswith(f"Not Found; did you mean /v1/{path}?")
        assert "mean" not in (await http.post("/nothing")).text
        for path, other in (
            ("v1/embeddings", "a server of embeddings"),
            ("rerank", "a server of rerankers"),
            ("v1/rerank", "a server of rerankers"),
            ("score", "a server of rerankers"),
            ("v1/images/generations", "a server with a multimodal model"),
            ("v1/audio/transcriptions", "a server with a multimodal model"),
        ):
            refused = await http.post(f"/{path}", json={"input": "hi"})
            assert refused.status_code == 404
            message = refused.json()["error"]["message"]
            assert message.endswith(f"this gateway generates text: use {other}")
        wrong = await http.get("/v1/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    async with site(nats_url, fresh_s=0.5) as at:
        await until_status(at.client, "/ready", 503)  # no digest for half a second


# ---------------------------------------------------------------- stopping


async def test_stopping_lets_running_streams_finish_and_takes_no_new_ones(nats_url: str) -> None:
    async with site(nats_url, drain_s=WITHIN_S) as at:
        async with at.stream("completions", {"prompt": "hang"}) as answer:
            lines = answer.aiter_lines()
            assert "w0" in [line async for line in _through(lines, "data: ")][-1]
            at.stop.set()
            async with asyncio.timeout(WITHIN_S):
                while not await _refused(at.url):
                    await asyncio.sleep(0.02)
            (running,) = at.fleet.asked.values()
            running.cancelled.set()
            rest = sse("\n".join([line async for line in lines]))
        assert [event["error"]["code"] for event in rest] == ["request_cancelled"]
        async with asyncio.timeout(WITHIN_S):
            await at.serving


async def test_a_stream_cut_by_the_end_of_the_drain_is_not_cancelled_and_can_be_attached_to(
    nats_url: str,
) -> None:
    async with site(nats_url, drain_s=1.0) as at:
        key = new_id()
        body, headers = {"prompt": "hang", "stream": True}, {"idempotency-key": key}
        async with at.stream("completions", body, key) as answer:
            at.stop.set()
            with pytest.raises(httpx.RemoteProtocolError):
                await answer.aread()
        await at.serving
        assert at.fleet.cancels == {}
        async with (
            gateway(nats_url) as (url, _, _),
            client_of(url) as http,
            http.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
        ):
            assert "w0" in [line async for line in _through(answer.aiter_lines(), "data: ")][-1]


async def _through(lines: AsyncIterator[str], beginning: str) -> AsyncIterator[str]:
    """Yield the lines up to and including the first with that beginning."""
    async for line in lines:
        yield line
        if line.startswith(beginning):
            return


async def _refused(url: str) -> bool:
    """Tells whether the gateway has closed its port."""
    try:
        async with client_of(url) as http:
            await http.get("/health")
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return True
    return False
