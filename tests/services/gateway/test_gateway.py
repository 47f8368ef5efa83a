"""The gateway over real HTTP on a real bus, with the clients that users have and a stand-in for the
fleet.
"""

import asyncio
import contextlib
import gzip
import json
import os
import re
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.api.translate import id_of_choice
from services.gateway.config import GatewayConfig
from services.gateway.http.guard import TENANT
from services.gateway.http.slo_headers import SLO_HEADERS, read_slo
from services.gateway.service import listen, serve
from shared import subjects
from shared.bus.nats import connect
from shared.rules.http_keys import line_of, new_key
from shared.rules.tiers import Tier
from shared.telemetry.telemetry import Off
from shared.telemetry.tracing import configure
from shared.text.chat_prompt import checked, labelled, marked
from shared.vocabulary import Definition, RequestKey, Slo
from tests.services.gateway.standin_fleet import FLOOD_WORD, MODEL, StandIn, standing_in

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


WITHIN_S = 60.0  # the longest that a busy machine may take for anything
PATIENT = {"submit_s": WITHIN_S, "fresh_s": WITHIN_S, "drain_s": 2.0}


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=WITHIN_S, trust_env=False)


@dataclass
class Site:
    url: str
    fleet: StandIn
    stop: asyncio.Event
    serving: asyncio.Task[None]

    def http(self) -> httpx.AsyncClient:
        return client_of(self.url)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S
        )


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@contextlib.asynccontextmanager
async def gateway(
    nats_url: str, **settings: Any
) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Task[None]]]:
    tracing = settings.pop("tracing", Off())
    cfg = GatewayConfig(url=nats_url, port=0, **{**PATIENT, **settings})
    listener, stop = listen(cfg), asyncio.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(serve(cfg, listener, stop, tracing))
    try:
        async with client_of(url) as http:
            assert (await http.get("/health")).status_code == 200
        yield url, stop, serving
    finally:
        stop.set()
        await serving


@contextlib.asynccontextmanager
async def site(nats_url: str, **settings: Any) -> AsyncIterator[Site]:
    async with (
        connect(nats_url, "stand-in") as bus,
        standing_in(bus) as fleet,
        gateway(nats_url, **settings) as (url, stop, serving),
    ):
        await fleet.digest()
        if "fresh_s" not in settings:
            async with client_of(url) as http:
                await until_status(http, "/ready", 200)
        yield Site(url, fleet, stop, serving)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


async def until_status(http: httpx.AsyncClient, path: str, status: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while (await http.get(path)).status_code != status:
            await asyncio.sleep(0.02)


def new_id() -> str:
    return uuid.uuid4().hex


def key_of(request_id: str, tenant: str = "default") -> RequestKey:
    return subjects.request_key(tenant, request_id)


def sse(raw: str) -> list[Any]:
    """Decode the `data:` events; [DONE] stays itself."""
    found = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


async def test_openai_client_gets_a_whole_completion(nats_url: str) -> None:
    async with site(nats_url) as at, at.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt="one two three", max_tokens=4)
        assert answer.choices[0].text == " w0 w1 w2 w3"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert (
            answer.usage.prompt_tokens,
            answer.usage.completion_tokens,
            answer.usage.total_tokens,
        ) == (3, 4, 7)
        assert answer.object == "text_completion"
        assert answer.model == MODEL
        assert (answer.model_extra or {})["service_tier"] == "default"


async def test_openai_client_streams_tokens_and_gets_usage_at_the_end_when_it_asks(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.openai() as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt=[1, 2, 3],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == " w0 w1 w2"
        assert [c.choices[0].finish_reason for c in chunks if c.choices] == [
            None,
            None,
            None,
            "length",
        ]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1


BAD_ENDS: list[tuple[str, type[openai.APIStatusError], int, str]] = [
    ("refuse permission_denied", openai.PermissionDeniedError, 403, "permission_denied"),
    ("refuse model_not_found", openai.NotFoundError, 404, "model_not_found"),
    ("refuse context_length_exceeded", openai.BadRequestError, 400, "context_length_exceeded"),
    ("refuse slow_down", openai.RateLimitError, 429, "slow_down"),
    ("refuse something_new", openai.BadRequestError, 400, "something_new"),
    ("end refused", openai.RateLimitError, 429, "slow_down"),
    ("end dropped", openai.RateLimitError, 429, "slow_down"),
    ("end failed", openai.InternalServerError, 500, "server_error"),
    ("end invalid", openai.BadRequestError, 400, "unsupported_parameter"),
    ("end expired", openai.InternalServerError, 504, "request_expired"),
    ("end cancelled", openai.APIStatusError, 499, "request_cancelled"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_refusal_and_bad_end_is_an_openai_error(nats_url: str, stream: bool) -> None:
    async with site(nats_url) as at, at.openai() as client:
        for prompt, kind, status, code in BAD_ENDS:
            with pytest.raises(kind) as caught:
                await client.completions.create(model=MODEL, prompt=prompt, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (status, code), prompt
            headers = caught.value.response.headers
            assert ("retry-after" in headers) == (status == 429), prompt
            if status == 429:
                assert headers["retry-after"] == ("3" if prompt.startswith("refuse") else "30")
                assert headers["x-llm-d-request-dropped-reason"] in (
                    "rejected-saturated",
                    "evicted-queue-pressure",
                )


async def test_contention_for_the_flex_tier_is_called_resource_unavailable(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        answer = await http.post(
            "/v1/completions", json={"prompt": "end refused", "service_tier": "flex"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "resource_unavailable")


async def test_a_stream_that_breaks_midway_raises_in_the_client_and_never_looks_complete(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="break", stream=True)
        assert [(await anext(stream)).choices[0].text for _ in range(2)] == [" w0", " w1"]
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert caught.value.code == "server_error"


@pytest.mark.parametrize("n", [1, 3])
async def test_without_admission_the_answer_is_503_and_says_that_there_is_no_endpoint(
    nats_url: str, n: int
) -> None:
    async with (
        gateway(nats_url, submit_s=0.3) as (url, _, _),
        client_of(url) as http,
    ):
        answer = await http.post("/v1/completions", json={"prompt": "hello", "n": n})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_is_overloaded"
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert answer.headers["retry-after"] == "1"


def test_an_slo_in_headers_is_judged_as_its_tier_is() -> None:
    tier = Tier(slo=Slo(ttft_s=1.0, definition=Definition.MEAN_TPOT))
    given = read_slo({"x-slo-tpot-ms": "50"}, tier)
    assert given == Slo(tbt_s=0.05, definition=Definition.MEAN_TPOT)
    assert read_slo({}, tier) is None


NOT_HEADERS = [
    ("x-llm-d-slo-tbt-ms", "x-llm-d-slo-tpot-ms"),
    ("x-llm-d-slo-foo-ms", "x-llm-d-slo-ttft-ms"),
    ("x-slo-ttft", "x-slo-ttft-ms"),
    ("x-slackline-teir", "x-slackline-tier"),
    ("x-slackline-ignored", "x-slackline-lenient"),
    (f"x-slackline-{1000 * 'x'}", "x-slackline-lenient"),
]


async def test_a_mistyped_header_of_ours_is_refused_and_those_there_are_are_named(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        for name, meant in NOT_HEADERS:
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
                answer = await http.post(path, json={"prompt": "hi"}, headers={name: "30"})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name[:64]), path
                assert len(answer.content) < 1000
            known = error["message"].partition("the nearest first: ")[2].split(", ")
            assert meant in known[:3], error
            assert {"x-slackline-allow-relegation", "x-slo-ttlt-ms"} < set(known)
        assert at.fleet.asked == {}
        others = {"x-slow": "1", "x-slackline": "1", "x-llm-d-inference-pool": "1"}
        answer = await http.post("/v1/completions", json={"prompt": "hi"}, headers=others)
        assert answer.status_code == 200


async def test_each_name_of_a_bound_gives_it(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        for bound, names in SLO_HEADERS.items():
            for name in names:
                request_id = new_id()
                headers = {"idempotency-key": request_id, name: "0.1"}
                answer = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
                assert answer.status_code == 200, name
                slo = at.fleet.asked[key_of(request_id)].request.slo
                assert slo == Slo(**{bound: 1e-4})
    assert SLO_HEADERS["ttlt_s"][1:] == ("x-llm-d-slo-ttlt-ms", "x-slo-ttlt-ms")


OUT_OF_BOUNDS = [
    ("0.001", "must be at least 0.1 ms"),
    ("-inf", "must be at least 0.1 ms"),
    ("1e12", "must be at most 31536000000 ms, a year"),
    ("inf", "must be at most 31536000000 ms, a year"),
    ("nan", "must be a number of milliseconds"),
    ("soon", "must be a number of milliseconds"),
]


async def test_a_bound_that_no_slo_can_have_is_refused_by_the_name_of_its_header(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        for name in (name for names in SLO_HEADERS.values() for name in names):
            for value, said in OUT_OF_BOUNDS:
                answer = await http.post(
                    "/v1/completions", json={"prompt": "a"}, headers={name: value}
                )
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name)
                assert error["message"] == f"{name} {said}"
        assert at.fleet.asked == {}


TPOT, THINKING = "x-llm-d-slo-tpot-ms", "x-slackline-slo-thinking-tpot-ms"
FAULTS: list[tuple[str, dict[str, str], str]] = [
    ("slo.ttft_s", {"x-slo-ttft-ms": "1"}, "x-slo-ttft-ms"),
    ("slo.ttft_s", {"x-slo-ttft-ms": "9", "x-llm-d-slo-ttft-ms": "1"}, "x-llm-d-slo-ttft-ms"),
    ("slo.tbt_s", {TPOT: "1", THINKING: "2"}, TPOT),
    ("slo.tbt_s", {TPOT: "2", THINKING: "1"}, THINKING),
    ("slo.tbt_s", {THINKING: "1"}, THINKING),
    ("slo.ttft_s", {}, "slo.ttft_s"),  # the tier's
    ("slo.ttft_s", {TPOT: "1"}, "slo.ttft_s"),
    ("prompt", {TPOT: "1"}, "prompt"),
]


async def test_an_slo_that_admission_refuses_is_called_by_the_header_that_gave_it(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        for param, headers, named in FAULTS:
            answer = await http.post(
                "/v1/completions",
                json={"prompt": f"refuse unattainable_slo {param}"},
                headers=headers,
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "unattainable_slo")
            assert error["param"] == named, (param, headers)


async def test_headers_become_tenant_slo_importance_and_trace(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        request_id = new_id()
        headers = {
            "idempotency-key": request_id,
            "x-llm-d-inference-fairness-id": "acme",
            "x-llm-d-slo-ttft-ms": "250",
            "x-slo-ttft-ms": "999",
            "x-slo-tpot-ms": "30.5",
            "x-slackline-slo-ttlt-ms": "60000",
            "x-slackline-slo-thinking-tpot-ms": "20",
            "x-slackline-application": "editor",
            "x-slackline-allow-relegation": "false",
            "traceparent": PARENT,
        }
        body = {
            "prompt": "hi",
            "max_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "stop": "END",
            "user": "u1",
            "priority": 2,
        }
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == request_id
        assert answer.json()["id"] == f"cmpl-{request_id}"
        key = key_of(request_id, "acme")
        request = at.fleet.asked[key].request
        assert request.slo == Slo(ttft_s=0.25, tbt_s=0.0305, ttlt_s=60.0, thinking_tbt_s=0.02)
        assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
        assert (
            request.application,
            request.session,
            request.allow_relegation,
            request.importance,
        ) == ("editor", "u1", False, 3.0)
        sampling = request.sampling
        assert (
            sampling.max_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.seed,
            sampling.stop,
        ) == (2, 0.5, 0.9, 7, ["END"])
        assert at.fleet.traceparents[key] == PARENT


TIERS_USED: list[tuple[dict[str, str], dict[str, str], str, str]] = [
    ({}, {}, "chat", "default"),
    ({"service_tier": "auto"}, {}, "chat", "default"),
    ({"service_tier": "priority"}, {}, "interactive", "priority"),
    ({"service_tier": "flex"}, {}, "summary", "flex"),
    ({"service_tier": "batch"}, {}, "batch", "batch"),
    ({"service_tier": "priority"}, {"x-slackline-tier": "batch"}, "batch", "batch"),
    ({"service_tier": "priority"}, {"x-llm-d-inference-objective": "batch"}, "batch", "batch"),
    (
        {},
        {"x-llm-d-inference-objective": "batch", "x-slackline-tier": "interactive"},
        "interactive",
        "priority",
    ),
    ({"service_tier": "priority", "prompt": "relegate"}, {}, "interactive", "flex"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_says_which_service_tier_was_used(nats_url: str, stream: bool) -> None:
    async with site(nats_url) as at, at.http() as http:
        for body, headers, tier, echo in TIERS_USED:
            request_id = new_id()
            answer = await http.post(
                "/v1/completions",
                json={"prompt": "hi", "stream": stream, **body},
                headers={"idempotency-key": request_id, **headers},
            )
            assert answer.status_code == 200
            events = sse(answer.text)[:-1] if stream else [answer.json()]
            assert {event["service_tier"] for event in events} == {echo}, body
            assert at.fleet.tiers[key_of(request_id)] == tier


VERDICTS = {"x-slackline-verdict": "true"}


async def test_an_answer_tells_the_verdict_on_each_choice_to_who_asks_for_it(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        asked = {"prompt": ["relegate", "hi"], "max_tokens": 2}
        answer = await http.post("/v1/completions", json=asked, headers=VERDICTS)
        late, kept = answer.json()["verdicts"]
        assert (late["slo_met"], late["relegated"]) == (False, True)
        assert (kept["slo_met"], kept["relegated"], kept["missed"]) == (True, False, "")
        assert answer.json()["service_tier"] == "flex"
        assert "replica" not in kept
        without = await http.post("/v1/completions", json=asked)
        assert "verdicts" not in without.json()


async def test_a_stream_tells_the_verdicts_once_all_its_choices_have_ended(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        asked = {"prompt": "relegate", "max_tokens": 2, "n": 2, "stream": True}
        answer = await http.post("/v1/completions", json=asked, headers=VERDICTS)
        *chunks, last = sse(answer.text)[:-1]
        assert not any("verdicts" in chunk for chunk in chunks)
        assert last["choices"][0]["finish_reason"] == "length"
        assert [one["slo_met"] for one in last["verdicts"]] == [False, False]
        with_usage = {**asked, "stream_options": {"include_usage": True}}
        answer = await http.post("/v1/completions", json=with_usage, headers=VERDICTS)
        assert len(sse(answer.text)[-2]["verdicts"]) == 2, "beside the usage"
        item = {"role": "user", "content": "relegate"}
        for stream in (False, True):
            answer = await http.post(
                "/v1/responses", json={"input": [item], "stream": stream}, headers=VERDICTS
            )
            reply = sse(answer.text)[-1]["response"] if stream else answer.json()
            assert [one["relegated"] for one in reply["verdicts"]] == [True]


MALFORMED: list[tuple[bytes, dict[str, str], str | None]] = [
    (b"{", {}, None),
    (b"\xff\xfe", {}, None),
    (b'{"prompt": "caf\xe9"}', {}, None),
    (b'"text"', {}, None),
    (b"[" * 100_000, {}, None),
    (b"{}", {}, "prompt"),
    (b'{"prompt": {"a": 1}}', {}, "prompt"),
    (b'{"prompt": [1, "a"]}', {}, "prompt"),
    (b'{"prompt": [99999999999999999999]}', {}, "prompt[0]"),
    (b'{"prompt": "a", "max_tokens": 0}', {}, "max_tokens"),
    (b'{"prompt": "a", "max_tokens": "many"}', {}, "max_tokens"),
    (b'{"prompt": "a", "temperature": -1}', {}, "temperature"),
    (b'{"prompt": "a", "n": 0}', {}, "n"),
    (b'{"prompt": "a", "n": 17}', {}, "n"),
    (b'{"prompt": ["a", "b", "c", "d", "e"], "n": 13}', {}, "n"),
    (b'{"prompt": [' + 64 * b'"a",' + b'"a"]}', {}, "prompt"),
    (b'{"prompt": []}', {}, "prompt"),
    (b'{"prompt": null}', {}, "prompt"),
    (b'{"prompt": ["a", [1]]}', {}, "prompt"),
    (b'{"prompt": "a", "logprobs": 21}', {}, "logprobs"),
    (b'{"prompt": "a", "logprobs": true}', {}, "logprobs"),
    (b'{"prompt": "a", "best_of": 2}', {}, "best_of"),
    (b'{"prompt": "a", "echo": true, "logprobs": 1}', {}, "echo"),
    (b'{"prompt": [1], "echo": true}', {}, "echo"),
    (b'{"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}', {}, "max_completion_tokens"),
    (b'{"prompt": "a", "stream_options": {"colour": 1}}', {}, "stream_options.colour"),
    (b'{"prompt": "a", "messages": []}', {}, "messages"),
    (b'{"prompt": "a", "frequency_penalty": 2.5}', {}, "frequency_penalty"),
    (b'{"prompt": "a", "colour": "red"}', {}, "colour"),
    (b'{"prompt": "\\ud800"}', {}, None),
    (b'{"prompt": "a", "' + b"x" * 1_000_000 + b'": 1}', {}, None),
    (b'{"prompt": "a", "service_tier": "platinum"}', {}, "service_tier"),
    (b'{"prompt": "a"}', {"x-slackline-tier": "slo.v1.>"}, "x-slackline-tier"),
    (
        b'{"prompt": "a"}',
        {"x-llm-d-inference-objective": "world peace"},
        "x-llm-d-inference-objective",
    ),
    (b'{"prompt": "a"}', {"idempotency-key": ""}, "idempotency-key"),
    (b'{"prompt": "a"}', {"x-llm-d-inference-fairness-id": ">"}, "x-llm-d-inference-fairness-id"),
    (b'{"prompt": "a"}', {"x-llm-d-slo-ttft-ms": "-5"}, "x-llm-d-slo-ttft-ms"),
    (b'{"prompt": "a"}', {"x-slo-tpot-ms": "nan"}, "x-slo-tpot-ms"),
    (b'{"prompt": "a"}', {"x-slackline-slo-ttlt-ms": "soon"}, "x-slackline-slo-ttlt-ms"),
    (
        b'{"prompt": "a"}',
        {"x-slackline-allow-relegation": "perhaps"},
        "x-slackline-allow-relegation",
    ),
    (b'{"prompt": "a"}', {"x-slackline-verdict": "perhaps"}, "x-slackline-verdict"),
]


async def test_a_key_names_a_request_and_a_correlation_id_only_comes_back(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        key, prompt = f"order 7/{new_id()}", {"prompt": "one"}
        answers = [
            await http.post(
                "/v1/completions",
                json=prompt,
                headers={"Idempotency-Key": key, "x-request-id": f"trace.{n}"},
            )
            for n in range(2)
        ]
        assert [a.headers["x-request-id"] for a in answers] == ["trace.0", "trace.1"]
        assert answers[0].json()["id"] == answers[1].json()["id"], "attached by its key"
        alike = {"x-request-id": "the same"}
        one = await http.post("/v1/completions", json=prompt, headers=alike)
        two = await http.post("/v1/completions", json={"prompt": "two"}, headers=alike)
        assert (one.status_code, two.status_code) == (200, 200)
        assert one.json()["id"] != two.json()["id"]
        for unfit in ("x" * 1000, "\x7f"):
            odd = await http.post("/v1/completions", json=prompt, headers={"x-request-id": unfit})
            assert odd.headers["x-request-id"] in odd.json()["id"], "its own id instead"


async def test_a_lenient_request_has_its_unknown_fields_ignored_and_named(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        body = {"prompt": "hi", "max_tokens": 1, "temprature": 1, "x\r\ny": {"deep": [1]}}
        strict = await http.post("/v1/completions", json=body)
        assert strict.status_code == 400
        lenient = {"x-slackline-lenient": "true"}
        answer = await http.post("/v1/completions", json=body, headers=lenient)
        assert answer.status_code == 200
        assert answer.headers["x-slackline-ignored"] == "temprature, x\\r\\ny"
        marked_body = b'\xef\xbb\xbf{"prompt": "hi"}'
        for content, status in ((b"[1]", 400), (b"{", 400), (marked_body, 200)):
            other = await http.post("/v1/completions", content=content, headers=lenient)
            assert other.status_code == status
            assert "x-slackline-ignored" not in other.headers
        many = {"prompt": "hi"} | {f"field{n}": n for n in range(5000)}
        answer = await http.post("/v1/completions", json=many, headers=lenient)
        assert answer.status_code == 200
        assert 500 < len(answer.headers["x-slackline-ignored"]) <= 512


async def test_a_lenient_request_may_have_unknown_fields_at_any_depth(nats_url: str) -> None:
    tool = {"type": "function", "strict": True, "function": {"name": "f", "cached": {"a": 1}}}
    body = {
        "messages": [{"role": "user", "content": "hi", "own": 1}],
        "max_tokens": 1,
        "tools": [tool, {"type": "function", "strict": True, "function": {"name": "g"}}],
        "tool_choice": {"type": "function", "function": {"name": "f", "more": 1}},
        "stream_options": {"include_usage": True, "extra": 1},
    }
    async with site(nats_url) as at, at.http() as http:
        strict = await http.post("/v1/chat/completions", json=body)
        assert strict.status_code == 400
        assert "x-slackline-lenient: true" in strict.json()["error"]["message"]
        lenient = {"x-slackline-lenient": "true"}
        answer = await http.post("/v1/chat/completions", json=body, headers=lenient)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-slackline-ignored"] == (
            "tools.strict, tools.function.cached, tool_choice.function.more, stream_options.extra"
        )


async def test_what_a_coding_agent_asks_of_others_alone_is_ignored_and_named(nats_url: str) -> None:
    function = {"type": "function", "name": "shell", "strict": False, "parameters": {}}
    body = {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ls"}]}
        ],
        "tools": [function, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "max_output_tokens": 2,
    }
    async with site(nats_url) as at, at.http() as http:
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-slackline-ignored"] == (
            "tools.web_search, tools.custom, reasoning.summary, text.verbosity"
        )
        assert [tool["name"] for tool in answer.json()["tools"]] == ["shell"]
        plain = await http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1})
        assert "x-slackline-ignored" not in plain.headers


CUT_OFF = '{"path": "a.txt", "text": "Once upo'
HISTORIES = {
    "a call cut off": {"tool_calls": [{"function": {"name": "write", "arguments": CUT_OFF}}]},
    "null": {"content": None, "refusal": "I cannot."},
    "no content": {},
    "no parts": {"content": [], "tool_calls": None},
    "a refusal": {"content": [{"type": "refusal", "refusal": "I cannot."}]},
}


@pytest.mark.parametrize("turn", HISTORIES.values(), ids=HISTORIES)
async def test_an_assistants_turn_that_clients_send_again_and_again_is_taken(
    nats_url: str, turn: dict[str, Any]
) -> None:
    messages = [
        {"role": "user", "content": "Write the file."},
        {"role": "assistant", **turn},
        {"role": "tool", "tool_call_id": "call_1", "content": None},
        {"role": "user", "content": "Go on."},
    ]
    for render in (marked, labelled):
        assert "Go on." in render(checked(messages), [{"function": {"name": "write"}}], {})
    async with site(nats_url) as at, at.http() as http:
        body = {"messages": messages, "max_tokens": 1}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


async def test_scripts_of_the_origins_that_are_named_may_ask(nats_url: str, tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys"
    file.write_text(line_of("acme", key))
    ours, other = "https://chat.example.com", "https://evil.example.com"
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    body = {"prompt": "hi", "max_tokens": 1, "stream": True}
    allowed = "access-control-allow-origin"
    async with (
        gateway(nats_url, cors_origins=[ours], keys=str(file)) as (url, _, _),
        connect(nats_url, "stand-in") as bus,
        standing_in(bus),
        client_of(url) as http,
    ):
        path, origin = "/v1/completions", {"origin": ours}
        preflight = await http.options(path, headers={**origin, **asks})
        assert (preflight.status_code, preflight.headers[allowed]) == (200, ours)
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = await http.options(path, headers={**asks, "origin": other})
        assert refused.status_code == 400
        assert allowed not in refused.headers
        with_key = {**origin, "authorization": f"Bearer {key}"}
        answer = await http.post(path, json=body, headers=with_key)
        assert (answer.status_code, answer.headers[allowed]) == (200, ours)
        assert sse(answer.text)[-1] == "[DONE]"
        without = await http.post(path, json=body, headers=origin)
        assert (without.status_code, without.headers[allowed]) == (401, ours)
        assert allowed not in (await http.get("/metrics", headers=origin)).headers
        assert allowed not in (await http.get("/v1/models", headers={"origin": other})).headers


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", ""])
def test_an_origin_that_no_browser_sends_stops_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        GatewayConfig(cors_origins=[origin])


UNKNOWN_FIELDS = [
    ("completions", "temprature", "; the nearest is `temperature`"),
    ("chat/completions", "mesages", "; the nearest is `messages`"),
    ("responses", "inputs", "; the nearest is `input`"),
    ("completions", "guided_choice", "; in its place there is `structured_outputs`, as in vLLM"),
    ("completions", "use_beam_search", ""),
]


async def test_an_unknown_field_is_told_with_the_one_that_may_be_meant(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        for path, field, meant in UNKNOWN_FIELDS:
            answer = await http.post(f"/v1/{path}", json={field: 1})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert error["code"] == "unknown_parameter"
            assert error["message"] == (
                f"unknown field `{field}`{meant}; "
                "with x-slackline-lenient: true unknown fields are ignored"
            )
        # this path is never lenient
        error = (await http.post("/detokenize", json={"token": [1]})).json()["error"]
        assert error["message"] == "unknown field `token`; the nearest is `tokens`"


async def test_an_empty_and_a_compressed_body_are_called_so(nats_url: str) -> None:
    plain = b'{"prompt": "hi"}'
    gzipped = {"content-encoding": "gzip"}
    async with site(nats_url) as at, at.http() as http:
        for empty in (b"", b" \n"):
            answer = await http.post("/v1/completions", content=empty)
            error = answer.json()["error"]
            assert (answer.status_code, error["message"]) == (400, "the body is empty")
        answer = await http.post("/v1/completions", content=gzip.compress(plain), headers=gzipped)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (415, "content-encoding")
        assert error["message"].startswith("Content-Encoding: gzip is not supported")
        assert answer.headers["accept-encoding"] == "identity"
        answer = await http.post("/v1/completions", content=plain, headers=gzipped)
        assert answer.status_code == 200


async def test_malformed_requests_are_answered_400_with_the_field_and_go_no_further(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        for body, headers, param in MALFORMED:
            answer = await http.post("/v1/completions", content=body, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["type"]) == (
                400,
                param,
                "invalid_request_error",
            ), error
            assert answer.headers["x-request-id"]
            assert len(answer.content) < 1000
        assert at.fleet.asked == {}


TOOL = b'"tools": [{"type": "function", "function": {"name": "f"}}]'
MESSAGES = b'"messages": [{"role": "user", "content": "hi"}]'
MALFORMED_CHATS: list[tuple[bytes, str | None]] = [
    (b"", "messages"),
    (b'"messages": "hi"', "messages"),
    (b'"messages": ["hi"]', "messages[0]"),
    (b'"prompt": "hi"', "prompt"),
    (MESSAGES + b', "prompt": "hi"', "prompt"),
    (MESSAGES + b', "tools": [{"type": "function", "function": {}}]', "tools[0].function.name"),
    (
        MESSAGES + b', "tools": [{"type": "function", "function": {"name": "a b"}}]',
        "tools[0].function.name",
    ),
    (MESSAGES + b', "tools": [{"type": "custom", "custom": {"name": "f"}}]', "tools[0].type"),
    (MESSAGES + b", " + TOOL.replace(b"]", b"," + TOOL[10:]), "tools"),
    (MESSAGES + b', "tool_choice": "required"', "tool_choice"),
    (MESSAGES + b", " + TOOL + b', "tool_choice": "any"', "tool_choice"),
    (
        MESSAGES
        + b", "
        + TOOL
        + b', "tool_choice": {"type": "function", "function": {"name": "g"}}',
        "tool_choice",
    ),
    (
        MESSAGES
        + b", "
        + TOOL
        + b', "tool_choice": "required", "response_format": {"type": "json_object"}',
        "response_format",
    ),
    (MESSAGES + b', "functions": [{"name": "f"}]', "functions"),
    (MESSAGES + b', "response_format": {"type": "xml"}', "response_format.type"),
    (MESSAGES + b', "modalities": ["text", "audio"]', "modalities"),
    (MESSAGES + b', "audio": {"voice": "alloy", "format": "wav"}', "audio"),
    (MESSAGES + b', "store": true', "store"),
    (MESSAGES + b', "reasoning_effort": "utmost"', "reasoning_effort"),
    (MESSAGES + b', "chat_template_kwargs": []', "chat_template_kwargs"),
    (MESSAGES + b', "web_search_options": {}', "web_search_options"),
    (MESSAGES + b', "metadata": {"a": 1}', "metadata"),
    (MESSAGES + b', "logprobs": 5', "logprobs"),
    (MESSAGES + b', "top_logprobs": 5', "top_logprobs"),
    (MESSAGES + b', "logprobs": true, "top_logprobs": 21', "top_logprobs"),
    (MESSAGES + b', "presence_penalty": -3', "presence_penalty"),
]


async def test_malformed_chats_are_answered_400_with_the_field_and_go_no_further(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        for fields, param in MALFORMED_CHATS:
            answer = await http.post("/v1/chat/completions", content=b"{" + fields + b"}")
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["type"]) == (
                400,
                param,
                "invalid_request_error",
            ), error
        assert at.fleet.asked == {}


async def test_what_real_clients_send_along_with_a_chat_is_taken(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        request_id = new_id()
        body = {
            "model": None,
            "messages": [
                {"role": "system", "content": "be brief"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
                    ],
                    "name": "ann",
                    "refusal": None,
                },
            ],
            "max_completion_tokens": 2,
            "max_tokens": 2,
            "user": "u1",
            "prompt_cache_key": "s1",
            "safety_identifier": "x",
            "metadata": {"team": "a"},
            "store": False,
            "parallel_tool_calls": True,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "top_p": 1,
            "frequency_penalty": 0,
            "logit_bias": None,
            "stream_options": None,
        }
        answer = await http.post(
            "/v1/chat/completions", json=body, headers={"idempotency-key": request_id}
        )
        assert answer.status_code == 200, answer.text
        request = at.fleet.asked[key_of(request_id)].request
        assert (request.session, request.sampling.max_tokens, request.messages) == (
            "s1",
            2,
            body["messages"],
        )


async def test_a_body_that_trickles_in_is_given_up(nats_url: str) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        async with at.http() as other:
            await until_metrics(other, 'slackline_gateway_responses_total{status="400"} 1')

    async with site(nats_url, body_within_s=0.1) as at, at.http() as http:
        answer = await http.post("/v1/completions", content=trickle())
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_timeout")


async def test_over_the_limit_of_unfinished_requests_a_new_one_is_refused_with_slow_down(
    nats_url: str,
) -> None:
    async with site(nats_url, requests_limit=1) as at, at.http() as http:
        async with http.stream("POST", "/v1/completions", json={"prompt": "hang", "stream": True}):
            answer = await http.post("/v1/completions", json={"prompt": "hi"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "slow_down")
            assert answer.headers["retry-after"] == "1"
        await until(lambda: len(at.fleet.cancels) == 1)
        await until_metrics(http, "slackline_gateway_unfinished_requests 0")
        assert (await http.post("/v1/completions", json={"prompt": "hi"})).status_code == 200


async def test_a_tenant_that_has_all_unfinished_requests_keeps_no_other_tenant_out(
    nats_url: str,
) -> None:
    hang, acme = {"prompt": "hang", "stream": True}, {TENANT: "acme"}
    async with site(nats_url, requests_limit=4) as at, at.http() as http:
        async with contextlib.AsyncExitStack() as streams:
            for _ in range(4):
                await streams.enter_async_context(
                    http.stream("POST", "/v1/completions", json=hang, headers=acme)
                )
            body = {"prompt": "hi"}
            more = await http.post("/v1/completions", json=body, headers=acme)
            other = await http.post("/v1/completions", json=body)
            assert (more.status_code, other.status_code) == (429, 200)
        await until_metrics(http, "slackline_gateway_unfinished_requests 0")


@pytest.mark.parametrize("size", [100_001, 200_000, 2_000_000])
async def test_a_body_over_the_limit_is_413_and_the_sender_hears_it(
    nats_url: str, size: int
) -> None:
    async with site(nats_url, body_limit_bytes=100_000) as at, at.http() as http:
        answer = await http.post("/v1/completions", content=b"x" * size)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (413, "request_too_large")
        assert error["message"] == "the body has more than 100,000 bytes"


async def test_a_body_whose_copies_for_every_choice_are_over_the_limit_is_413(
    nats_url: str,
) -> None:
    async with site(nats_url, body_limit_bytes=100_000) as at, at.http() as http:
        answer = await http.post("/v1/completions", json={"prompt": "x" * 20_000, "n": 5})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (413, "n")
        assert "100,000 bytes" in error["message"]
        assert (
            await http.post("/v1/completions", json={"prompt": "x" * 20_000, "n": 4})
        ).status_code == 200


async def test_a_request_whose_answer_was_lost_is_withdrawn_unless_its_client_knows_its_id(
    nats_url: str,
) -> None:
    async with site(nats_url, submit_s=0.5) as at, at.http() as http:
        known = new_id()
        for prompt in ("silent", "refuse server_is_overloaded"):
            for headers in ({"idempotency-key": known}, {}):
                answer = await http.post(
                    "/v1/completions", json={"prompt": prompt}, headers=headers
                )
                assert answer.status_code == 503
            made_up = key_of(answer.headers["x-request-id"])
            await until(lambda: made_up in at.fleet.cancels)  # noqa: B023 - called at once
        assert key_of(known) not in at.fleet.cancels


async def test_a_client_that_hangs_up_cancels_its_request(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        streamed, whole = new_id(), new_id()
        async with http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "hang", "stream": True},
            headers={"idempotency-key": streamed},
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    break
            assert at.fleet.cancels == {}
        await until(lambda: key_of(streamed) in at.fleet.cancels)
        waiting = asyncio.create_task(
            http.post(
                "/v1/completions", json={"prompt": "hang"}, headers={"idempotency-key": whole}
            )
        )
        await until(lambda: key_of(whole) in at.fleet.asked)
        waiting.cancel()
        await until(lambda: key_of(whole) in at.fleet.cancels)
        await until_metrics(http, "slackline_gateway_hung_up_total 2")


async def test_a_finished_request_is_not_cancelled_when_its_connection_closes(
    nats_url: str,
) -> None:
    async with site(nats_url) as at:
        for stream in (False, True):
            async with at.http() as http:
                assert (
                    await http.post("/v1/completions", json={"prompt": "hi", "stream": stream})
                ).status_code == 200
        async with at.http() as http:
            await until_metrics(http, "slackline_gateway_unfinished_requests 0")
            text = (await http.get("/metrics")).text
        assert 'slackline_gateway_responses_total{status="200"} 2' in text
        assert "slackline_gateway_hung_up_total 0" in text
        assert at.fleet.cancels == {}


async def until_metrics(http: httpx.AsyncClient, line: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while line not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.02)


CHAT: list[Any] = [{"role": "user", "content": "hi"}]


async def test_a_chat_is_answered_whole_in_the_words_of_openai(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        request_id = new_id()
        answer = await http.post(
            "/v1/chat/completions",
            json={"messages": CHAT, "max_tokens": 2},
            headers={"idempotency-key": request_id},
        )
        assert answer.headers["x-request-id"] == request_id
        body = answer.json()
        assert body.pop("created") > 1_700_000_000
        assert body == {
            "id": f"chatcmpl-{request_id}",
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


async def test_a_chat_streams_its_role_then_words_then_the_end_then_usage(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        body = {
            "messages": CHAT,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events = sse((await http.post("/v1/chat/completions", json=body)).text)
        assert events.pop() == "[DONE]"
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert [event["choices"] for event in events] == [
            [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": "", "refusal": None},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
            [{"index": 0, "delta": {"content": " w0"}, "logprobs": None, "finish_reason": None}],
            [{"index": 0, "delta": {"content": " w1"}, "logprobs": None, "finish_reason": None}],
            [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}],
            [],
        ]
        assert [event["usage"] for event in events] == [None] * 4 + [usage(3, 2)]


@pytest.mark.parametrize(
    ("path", "mute", "likely"),
    [
        ("completions", {"prompt": "mute"}, {"logprobs": 0}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "mute"}]},
            {"logprobs": True},
        ),
    ],
)
async def test_a_token_without_a_text_has_a_chunk_only_if_something_else_is_told_of_it(
    nats_url: str, path: str, mute: dict[str, Any], likely: dict[str, Any]
) -> None:
    async with site(nats_url) as at, at.http() as http:
        for told, chunks in (({}, 0), (likely, 3), ({"return_token_ids": True}, 3)):
            body = {**mute, **told, "max_tokens": 3, "stream": True}
            events = sse((await http.post(f"/v1/{path}", json=body)).text)
            assert events.pop() == "[DONE]"
            assert events.pop()["choices"][0]["finish_reason"] == "length"
            choices = [event["choices"][0] for event in events]
            assert len([one for one in choices if "role" not in one.get("delta", {})]) == chunks


async def test_usage_so_far_comes_with_every_chunk_if_wanted(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {
            "prompt": ["one two three", "one two three"],
            "max_tokens": 3,
            "stream": True,
            "stream_options": options,
        }
        events = sse((await http.post("/v1/completions", json=body)).text)[:-1]
        made = [
            event["usage"]["completion_tokens"]
            for event in events
            if event["choices"] and event["choices"][0]["text"]
        ]
        assert made == [1, 2, 3, 4, 5, 6]
        assert {event["usage"]["prompt_tokens"] for event in events} == {6}


async def test_a_chat_without_max_tokens_asks_for_what_fits_and_a_completion_for_16(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        chat, likely, plain = new_id(), new_id(), new_id()
        await http.post(
            "/v1/chat/completions", json={"messages": CHAT}, headers={"idempotency-key": chat}
        )
        await http.post(
            "/v1/chat/completions",
            json={"messages": CHAT, "logprobs": True},
            headers={"idempotency-key": likely},
        )
        await http.post(
            "/v1/completions", json={"prompt": "hi"}, headers={"idempotency-key": plain}
        )
        asked = [
            at.fleet.asked[key_of(request_id)].request.sampling.max_tokens
            for request_id in (chat, likely, plain)
        ]
        assert asked == [1_000_000, 8192, 16]


async def test_a_limit_of_tokens_over_any_context_is_cut(nats_url: str) -> None:
    asked = [
        ("completions", {"prompt": "hi", "max_tokens": 99_999_999}),
        ("chat/completions", {"messages": CHAT, "max_completion_tokens": 99_999_999}),
        ("responses", {"input": "hi", "max_output_tokens": 99_999_999}),
    ]
    async with site(nats_url) as at, at.http() as http:
        for path, body in asked:
            key = new_id()
            answer = await http.post(f"/v1/{path}", json=body, headers={"idempotency-key": key})
            assert answer.status_code == 200, answer.text
            assert at.fleet.asked[key_of(key)].request.sampling.max_tokens == 1_000_000


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_written_as_each_api_has_them(
    nats_url: str, stream: bool
) -> None:
    async with site(nats_url) as at, at.http() as http:
        body = {"max_tokens": 2, "stream": stream}
        half = {"token": "bytes:\\xe2\\x80", "bytes": [0xE2, 0x80], "logprob": -0.25}
        whole = {"token": "\u00e9", "bytes": [0xC3, 0xA9], "logprob": -9999.0}
        answer = await http.post(
            "/v1/chat/completions",
            json=body | {"messages": CHAT, "logprobs": True, "top_logprobs": 2},
        )
        found = [
            c["logprobs"]
            for e in (sse(answer.text)[:-1] if stream else [answer.json()])
            for c in e["choices"]
            if c["logprobs"]
        ]
        assert [entry for one in found for entry in one["content"]] == [
            {
                "token": f" w{n}",
                "bytes": list(f" w{n}".encode()),
                "logprob": -0.5 - n,
                "top_logprobs": [half, whole],
            }
            for n in range(2)
        ]
        answer = await http.post("/v1/completions", json=body | {"prompt": "hi", "logprobs": 1})
        found = [
            c["logprobs"]
            for e in (sse(answer.text)[:-1] if stream else [answer.json()])
            for c in e["choices"]
            if c["logprobs"]
        ]
        assert {name: [value for one in found for value in one[name]] for name in found[0]} == {
            "tokens": [" w0", " w1"],
            "token_logprobs": [-0.5, -1.5],
            "top_logprobs": [
                {"bytes:\\xe2\\x80": -0.25, " w0": -0.5},
                {"bytes:\\xe2\\x80": -0.25, " w1": -1.5},
            ],
            "text_offset": [0, 3],
        }


async def test_several_prompts_and_choices_are_several_requests_with_ids_and_seeds_of_their_own(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        request_id, long_id = new_id(), "x" * 64
        body = {"prompt": ["one", "two"], "n": 2, "seed": 2**63 - 1, "max_tokens": 3, "echo": True}
        answer = (
            await http.post("/v1/completions", json=body, headers={"idempotency-key": request_id})
        ).json()
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [
            (0, "one w0 w1 w2"),
            (1, "one w0 w1 w2"),
            (2, "two w0 w1 w2"),
            (3, "two w0 w1 w2"),
        ]
        assert answer["usage"] == usage(6, 12)
        requests = [
            at.fleet.asked[key_of(name)].request
            for name in (id_of_choice(request_id, i) for i in range(4))
        ]
        assert {r.choices for r in requests} == {4}  # fewer or more under the key are a conflict
        assert [(r.prompt, r.sampling.seed) for r in requests] == [
            (p, s) for p in ("one", "two") for s in (2**63 - 1, -(2**63))
        ]
        again = (
            await http.post("/v1/completions", json=body, headers={"idempotency-key": request_id})
        ).json()
        assert again["choices"] == answer["choices"]
        assert len(at.fleet.asked) == 4
        for _ in range(2):
            answer = (
                await http.post(
                    "/v1/completions",
                    json={"prompt": [[1], [2, 3]]},
                    headers={"idempotency-key": long_id},
                )
            ).json()
            assert answer["id"] == f"cmpl-{long_id}"
        assert len(at.fleet.asked) == 6


async def test_choices_stream_side_by_side_each_complete_under_its_index(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        body = {
            "messages": CHAT,
            "n": 16,
            "max_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events = sse((await http.post("/v1/chat/completions", json=body)).text)
        assert events.pop() == "[DONE]"
        assert events.pop()["usage"] == usage(3, 320)
        streamed: dict[int, list[Any]] = {}
        for event in events:
            (choice,) = event["choices"]
            streamed.setdefault(choice["index"], []).append(choice)
        assert sorted(streamed) == list(range(16))
        for chunks in streamed.values():
            assert chunks[0]["delta"]["role"] == "assistant"
            assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "".join(
                f" w{n}" for n in range(20)
            )
            assert [chunk["finish_reason"] for chunk in chunks] == [None] * 21 + ["length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("last", ["refuse slow_down", "end refused"])
async def test_if_one_choice_is_refused_the_answer_is_that_refusal_and_the_others_are_cancelled(
    nats_url: str, stream: bool, last: str
) -> None:
    async with site(nats_url) as at, at.http() as http:
        request_id = new_id()
        body = {"prompt": ["wait", "wait", last], "stream": stream}
        answer = await http.post(
            "/v1/completions", json=body, headers={"idempotency-key": request_id}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "slow_down")
        assert answer.headers["retry-after"] == ("3" if last.startswith("refuse") else "30")
        await until(
            lambda: (
                set(at.fleet.cancels) == {key_of(request_id), key_of(id_of_choice(request_id, 1))}
            )
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_if_one_choice_fails_midway_the_answer_is_an_error_and_the_others_are_cancelled(
    nats_url: str, stream: bool
) -> None:
    async with site(nats_url) as at, at.http() as http:
        request_id = new_id()
        body = {"prompt": ["hang", "hang", "break"], "stream": stream}
        answer = await http.post(
            "/v1/completions", json=body, headers={"idempotency-key": request_id}
        )
        if stream:
            assert answer.status_code == 200
            assert sse(answer.text)[-1]["error"]["code"] == "server_error"
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "server_error")
        await until(
            lambda: (
                set(at.fleet.cancels) == {key_of(request_id), key_of(id_of_choice(request_id, 1))}
            )
        )


async def test_an_answer_of_which_one_choice_was_relegated_was_served_as_flex(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.http() as http:
        answer = await http.post("/v1/completions", json={"prompt": ["hi", "relegate"]})
        assert answer.json()["service_tier"] == "flex"


async def test_a_client_that_hangs_up_cancels_all_its_choices(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        request_id = new_id()
        messages = [{"role": "user", "content": "hang"}]
        async with http.stream(
            "POST",
            "/v1/chat/completions",
            json={"messages": messages, "n": 3, "stream": True},
            headers={"idempotency-key": request_id},
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    break
        await until(
            lambda: (
                set(at.fleet.cancels)
                == {key_of(name) for name in (id_of_choice(request_id, n) for n in range(3))}
            )
        )


async def test_every_choice_counts_towards_the_limit_of_unfinished_requests(nats_url: str) -> None:
    async with site(nats_url, requests_limit=3) as at, at.http() as http:
        assert (
            await http.post("/v1/completions", json={"prompt": "hi", "n": 4})
        ).status_code == 429
        assert (
            await http.post("/v1/completions", json={"prompt": "hi", "n": 3})
        ).status_code == 200
        await until_metrics(http, "slackline_gateway_unfinished_requests 0")


async def test_spans_are_named_for_the_operation_and_tell_what_was_used(
    nats_url: str, tmp_path: Path
) -> None:
    tracing = configure(
        "gateway", "g", environ={"SLACKLINE_TRACE_FILE": str(tmp_path / "spans.jsonl")}
    )
    async with site(nats_url, tracing=tracing) as at, at.http() as http:
        await http.post("/v1/chat/completions", json={"messages": CHAT, "n": 2, "max_tokens": 2})
        await http.post("/v1/completions", json={"prompt": "end expired"})
    tracing.close()
    chat, completion = [
        json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()
    ]
    assert chat["name"] == f"chat {MODEL}"
    attributes = chat["attributes"]
    assert (
        attributes["gen_ai.operation.name"],
        attributes["gen_ai.usage.input_tokens"],
        attributes["gen_ai.usage.output_tokens"],
    ) == ("chat", 3, 4)
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert completion["name"] == f"text_completion {MODEL}"
    assert completion["attributes"]["error.type"] == "request_expired"


async def test_the_same_request_id_attaches_and_gives_the_same_text(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        request_id = new_id()
        body = {"prompt": "once", "max_tokens": 5, "return_token_ids": True}
        first = (
            await http.post("/v1/completions", json=body, headers={"idempotency-key": request_id})
        ).json()
        again = (
            await http.post("/v1/completions", json=body, headers={"idempotency-key": request_id})
        ).json()
        assert first["choices"] == again["choices"]
        assert again["choices"][0]["token_ids"] == [0, 1, 2, 3, 4]
        assert len(at.fleet.asked) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_no_reader_of_lines_breaks_an_answer(nats_url: str, stream: bool) -> None:
    """Every character that Python and httpx take for the end of a line is escaped."""
    text = "a\u2028b\u2029c\u0085d\u00e9"
    async with site(nats_url) as at, at.http() as http:
        body = {"prompt": text, "echo": True, "max_tokens": 1, "stream": stream}
        answer = (await http.post("/v1/completions", json=body)).text
        assert (answer.splitlines() == answer.split("\n")[:-1]) == stream
        events = sse(answer)[:-1] if stream else [json.loads(answer)]
        assert "".join(event["choices"][0]["text"] for event in events) == f"{text} w0"
        refused = await http.get(f"/v1/models/{text}")
        assert len(refused.text.splitlines()) == 1


async def test_a_slow_reader_gets_every_token_though_more_than_the_queue_holds_were_made(
    nats_url: str,
) -> None:
    count = 6000  # 6 MB of text: over what the sockets and the handle's 1024 events hold
    async with site(nats_url) as at, at.http() as http:
        request_id = new_id()
        async with http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "flood", "max_tokens": count, "stream": True},
            headers={"idempotency-key": request_id},
        ) as answer:
            # nothing read until it has ended
            await until(lambda: at.fleet.asked[key_of(request_id)].verdict is not None)
            events = sse("".join([part async for part in answer.aiter_text()]))
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == FLOOD_WORD * count
        assert at.fleet.attaches > 0


async def test_a_reader_that_reads_nothing_for_too_long_has_hung_up(nats_url: str) -> None:
    async with site(nats_url, stall_s=0.3) as at, at.http() as http:
        request_id = new_id()
        async with http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "flood", "max_tokens": 12_000, "stream": True},
            headers={"idempotency-key": request_id},
        ):
            await until(lambda: key_of(request_id) in at.fleet.cancels)


async def test_a_silent_stream_is_kept_alive_by_comments(nats_url: str) -> None:
    async with site(nats_url, keepalive_s=0.05) as at, at.http() as http:
        lines: list[str] = []
        async with http.stream(
            "POST", "/v1/completions", json={"prompt": "wait", "max_tokens": 1, "stream": True}
        ) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if sum(line.startswith(":") for line in lines) == 2:
                    at.fleet.go.set()
        assert [event["choices"][0]["text"] for event in sse("\n".join(lines))[:-1]] == [" w0", ""]
        assert lines[0].startswith(":")


async def test_health_readiness_models_and_unknown_paths(nats_url: str) -> None:
    async with (
        gateway(nats_url) as (url, _, _),
        client_of(url) as http,
    ):
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}
        assert "no replica has been heard of" in (await http.get("/v1/models/no/such")).text
    async with site(nats_url) as at, at.http() as http, at.openai() as client:
        assert (await http.get("/ready")).status_code == 200
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        unknown = f"unknown model `no/such`; this fleet serves `{MODEL}`"
        with pytest.raises(openai.NotFoundError, match=unknown):
            await client.models.retrieve("no/such")
        asked = await http.post("/tokenize", json={"model": "no/such", "prompt": "hi"})
        assert (asked.status_code, asked.json()["error"]["message"]) == (404, unknown)
        assert (await http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        short = (await http.post("/chat/completions", json={})).json()["error"]["message"]
        assert short.endswith("Not Found; did you mean /v1/chat/completions?")
        short = (await http.get("/files/file-1")).json()["error"]["message"]
        assert short.endswith("Not Found; did you mean /v1/files/file-1?")
        assert "mean" not in (await http.post("/nothing")).text
        wrong = await http.get("/v1/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    async with site(nats_url, fresh_s=0.5) as at, at.http() as http:
        await until_status(http, "/ready", 503)  # no digest for half a second


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_its_model_though_no_replica_was_heard_when_it_was_asked_for(
    nats_url: str, stream: bool
) -> None:
    body = {"prompt": "wait", "max_tokens": 2, "stream": stream}
    async with (
        connect(nats_url, "stand-in") as bus,
        standing_in(bus) as fleet,
        gateway(nats_url) as (url, _, _),
        client_of(url) as http,
    ):
        asked = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: bool(fleet.asked))
        assert (await http.get("/v1/models")).json()["data"] == []
        await fleet.digest()
        await until_status(http, "/ready", 200)
        fleet.go.set()
        answer = await asked
    replies = sse(answer.text)[:-1] if stream else [answer.json()]
    assert {reply["model"] for reply in replies} == {MODEL}


async def test_metrics_are_in_the_prometheus_format(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        await http.post("/v1/completions", json={"prompt": "hi"})
        await http.post("/v1/completions", content=b"{")
        for status in (200, 400):
            await until_metrics(http, f'slackline_gateway_responses_total{{status="{status}"}} 1')
        answer = await http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert re.search(
            r'^slackline_gateway_responses_total\{status="200"\} 1$', answer.text, re.MULTILINE
        )


async def test_stopping_lets_running_streams_finish_and_takes_no_new_ones(nats_url: str) -> None:
    async with site(nats_url, drain_s=WITHIN_S) as at, at.http() as http:
        async with http.stream(
            "POST", "/v1/completions", json={"prompt": "hang", "stream": True}
        ) as answer:
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
        request_id = new_id()
        body = {"prompt": "hang", "stream": True}
        headers = {"idempotency-key": request_id}
        async with (
            at.http() as http,
            http.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
        ):
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


async def test_the_process_serves_openai_clients_and_stops_cleanly_on_sigterm(
    nats_url: str, tmp_path: Path
) -> None:
    config = tmp_path / "slackline.toml"
    config.write_text(f"url = '{nats_url}'\n[gateway]\nport = 0\ndrain_s = 2.0\n")
    async with connect(nats_url, "stand-in") as bus, standing_in(bus):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.gateway",
            cwd=Path(__file__).parents[3],
            env={**os.environ, "SLACKLINE_CONFIG": str(config)},
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            address = ""
            async with asyncio.timeout(WITHIN_S):
                while not address:
                    line = json.loads(await process.stdout.readline())
                    address = line["address"] if line["event"] == "service.ready" else ""
            client = openai.AsyncOpenAI(
                base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=WITHIN_S
            )
            async with client:
                answer = await client.completions.create(model=MODEL, prompt="hi", max_tokens=2)
                assert answer.choices[0].text == " w0 w1"
        finally:
            process.terminate()
            said = [json.loads(line) async for line in process.stdout]
        assert await process.wait() == 0
        events = [line["event"] for line in said]
        assert events[-1] == "service.stopped", said
        assert "request.served" in events
