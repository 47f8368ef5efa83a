"""Tests of a fleet of real processes on a real nats-server: it answers, refuses and cancels."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.errors import ConfigError, PeerError
from shared.schemas import Announce, Delta, GenerateRequest, Withdraw, Withdrawn
from shared.subjects import request_key
from shared.vocabulary import FinishReason, ReplicaId
from tests.fleet.live import WAIT_S, ask, check, client_of, connect_raw, request_for, until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON = {"Content-Type": "application/json"}
SEED = 20_261_120


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(
        FleetSpec(pace=0.2, store=tmp_path_factory.mktemp("fleet"), drain_s=2.0)
    ) as fleet:
        yield fleet
        assert [c.name for c in fleet.processes if c.starts != 1] == [], (
            "a client's messages ended a service"
        )


async def test_two_fleets_never_share_a_store(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="in use"):
        await Fleet(FleetSpec(store=fleet.spec.store)).__aenter__()


# ---------------------------------------------------------------- answers


async def test_a_request_over_nats_is_answered_in_messagepack_and_attached_to_after_its_end(
    fleet: Fleet,
) -> None:
    async with client_of(fleet) as (bus, client, wire):
        request = request_for(40, prompt="Why is the sky blue?")
        delivered = await ask(client, request)
        await check(bus, wire, [delivered])
        again = await client.submit(request, "chat")
        assert again.received is not None
        assert again.received.attached
        tokens: list[int] = []
        async for event in again:
            tokens += getattr(event, "tokens", [])
        assert tokens == delivered.tokens
        assert await again.wait() == delivered.verdict
        assert len(delivered.tokens) == 40


async def test_another_request_under_a_used_id_is_a_conflict_over_nats_and_http_alike(
    fleet: Fleet,
) -> None:
    first: dict[str, Any] = {"prompt": "one", "max_tokens": 9, "seed": 1, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S, trust_env=False) as http,
        client_of(fleet) as (_, client, _),
    ):

        async def post(request_id: str, **changed: object) -> httpx.Response:
            headers = {"idempotency-key": request_id}
            return await http.post("/v1/completions", json=first | changed, headers=headers)

        answer = (await post("used-1")).json()
        refused = await post("used-1", prompt="two")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        again = (await post("used-1")).json()
        assert again["choices"] == answer["choices"], "the same request is a retry"
        request = GenerateRequest(request_id="used-2", prompt="one")
        delivered = await ask(client, request)
        with pytest.raises(PeerError) as conflict:
            await client.submit(msgspec.structs.replace(request, prompt="two"), "chat")
        assert (conflict.value.code, conflict.value.param) == ("conflict", "request_id")
        later = msgspec.structs.replace(request, importance=2.0, expires_s=9.0, session="s")
        assert (await ask(client, later)).text == delivered.text


async def test_ids_that_are_used_twice_at_once_run_once(fleet: Fleet) -> None:
    async with client_of(fleet) as (_, client, wire):
        request = request_for(30)
        async with client_of(fleet) as (_, other, others):
            first, second = await asyncio.gather(ask(client, request), ask(other, request))
        assert first.tokens == second.tokens
        assert first.text == second.text
        assert first.verdict == second.verdict
        assert first.verdict is not None
        events = [
            event for each in (wire, others) for events in each.events.values() for event in events
        ]
        spoke = {event.attempt for event in events if isinstance(event, Delta)}
        assert spoke == {first.verdict.attempts}, (
            "an attempt that was declined for the other's sake never speaks"
        )


async def test_a_cancelled_request_ends_as_cancelled_and_frees_what_it_held(fleet: Fleet) -> None:
    async with client_of(fleet) as (bus, client, _):
        handle = await client.submit(request_for(7000, prompt="a" * 500), "chat")
        tokens = 0
        async with asyncio.timeout(WAIT_S):
            async for event in handle:
                tokens += len(getattr(event, "tokens", []))
                if tokens >= 3 and not handle.cancelling:
                    await handle.cancel()
        verdict = await handle.wait()
        assert verdict.finish_reason == "cancelled"
        assert verdict.output_tokens == tokens < 7000
        await until_idle(bus, fleet.replicas)


# ---------------------------------------------------------------- bad input


# The fields sent as JSON, and the code of the refusal; None: any code.
BAD_REQUESTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "an id with *": ({"request_id": "a*"}, "invalid_id"),
    "an empty id": ({"request_id": ""}, "invalid_id"),
    "an id of 65 characters": ({"request_id": "a" * 65}, "invalid_id"),
    "another tenant than that of the subject": ({"tenant": "acme"}, None),
    "no id": ({"request_id": None}, None),
    "an empty prompt": ({"prompt": ""}, None),
    "two prompts": ({"token_ids": [1]}, None),
    "a prompt over the context": ({"prompt": "a" * 9000}, "context_length_exceeded"),
    "a prompt of half a surrogate pair": ({"prompt": "\ud800"}, None),
    "token ids outside the vocabulary": ({"prompt": None, "token_ids": [10**6]}, None),
    "token ids that are negative": ({"prompt": None, "token_ids": [-1]}, None),
    "messages of nothing": ({"prompt": None, "messages": []}, None),
    "messages that are numbers": ({"prompt": None, "messages": [1]}, None),
    "an unknown model": ({"model": "gpt-17"}, "model_not_found"),
    "an SLO of zero": ({"slo": {"tbt_s": 0}}, None),
    "an SLO shorter than any iteration": ({"slo": {"tbt_s": 5e-324}}, None),
    "an SLO longer than a life": ({"slo": {"ttlt_s": 1e300}}, None),
    "an SLO of nothing": ({"slo": {}}, None),
    "an unknown field": ({"temprature": 1}, None),
    "no tokens": ({"sampling": {"max_tokens": 0}}, None),
    "a negative temperature": ({"sampling": {"temperature": -1}}, None),
    "a seed beyond 64 bits": ({"sampling": {"seed": 10**30}}, None),
    "a stop token beyond 64 bits": ({"sampling": {"stop_token_ids": [10**30]}}, None),
    "importance beyond measure": ({"importance": 1e300}, None),
    "an inbox that is no inbox": ({"inbox": "slo.v1.leases"}, None),
    "an inbox of another tenant": ({"inbox": "_INBOX.acme.1"}, None),
    "an inbox of no tenant": ({"inbox": "_INBOX.1"}, None),
    "expiry in the past": ({"expires_s": -5}, None),
}


async def refused(raw: Any, subject: str, payload: bytes) -> dict[str, Any]:
    answer = await raw.request(subject, payload, headers=JSON, timeout=WAIT_S)
    refusal: dict[str, Any] = json.loads(answer.data)
    assert refusal["type"] == "refused", refusal
    assert refusal["message"]
    return refusal


async def test_a_worker_does_not_say_what_became_of_an_attempt_of_its_former_life(
    fleet: Fleet,
) -> None:
    """It would say that it never had the attempt, and tokens that a client has would be lost."""
    key = request_key("default", f"former-{SEED}")
    former = Withdraw(key=key, attempt=1, incarnation="former")
    async with client_of(fleet) as (bus, _, _wire):
        with pytest.raises(PeerError, match="its log says"):
            await bus.request(subjects.withdraw(ReplicaId("r1")), former, Withdrawn, timeout_s=30.0)


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_is_refused_with_a_reason(fleet: Fleet, name: str) -> None:
    change, code = BAD_REQUESTS[name]
    raw = await connect_raw(fleet)
    body = {"request_id": "bad-1", "prompt": "hello"} | change
    payload = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
    refusal = await refused(raw, "slo.v1.requests.default.chat", payload)
    assert code in (None, refusal["code"]), refusal
    await raw.close()


async def test_an_unknown_tier_and_an_unknown_id_are_refused(fleet: Fleet) -> None:
    raw = await connect_raw(fleet)
    refusal = await refused(
        raw, "slo.v1.requests.default.nosuch", b'{"request_id": "a", "prompt": "b"}'
    )
    assert refusal["code"] == "unknown_tier"
    refusal = await refused(raw, "slo.v1.attach.default", b'{"request_id": "never-seen"}')
    assert refusal["code"] == "not_found"
    await raw.close()


async def test_a_cancel_of_what_never_was_leaves_its_id_usable(fleet: Fleet) -> None:
    async with client_of(fleet) as (bus, client, wire):
        raw = await connect_raw(fleet)
        await raw.publish(subjects.cancel(request_key("default", "later")), b"{}", headers=JSON)
        await raw.flush()
        await raw.close()
        await check(bus, wire, [await ask(client, request_for(5, "later"))])


async def test_a_prompt_beyond_the_context_ends_as_invalid_also_when_no_worker_is_heard() -> None:
    """At the door, while a worker was heard once; else as soon as one is heard again."""
    hasty = {
        "SLACKLINE_ADMISSION_SWEEP_S": "0.2",
        "SLACKLINE_ADMISSION_LOST_S": "1.0",
        "SLACKLINE_ADMISSION_HOMELESS_S": "0.5",
    }
    spec = FleetSpec(replicas=1, gateway=False, drain_s=1.0, environment=hasty)
    too_long = "a" * 20_000
    async with Fleet(spec) as fleet, client_of(fleet) as (bus, client, wire):
        heard = asyncio.Event()
        await bus.subscribe(subjects.ANNOUNCEMENTS, Announce, lambda *_: heard.set())
        worker = fleet.process("worker-r1")
        await client.submit(request_for(2000), "chat")
        async with asyncio.timeout(WAIT_S):
            await heard.wait()
            while not any(isinstance(e, Delta) for events in wire.events.values() for e in events):
                await asyncio.sleep(0.05)
            worker.send(signal.SIGSTOP)
            await wire.replaced.wait()
        with pytest.raises(PeerError, match=r"maximum context length is .* your prompt has 20000"):
            await client.submit(GenerateRequest(request_id="c-1", prompt=too_long), "chat")
        fleet.process("admission").kill()
        handle = await client.submit(GenerateRequest(request_id="c-2", prompt=too_long), "chat")
        worker.send(signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):
            verdict = await handle.wait()
        assert verdict.finish_reason == FinishReason.INVALID
        assert "20000 tokens" in verdict.message
