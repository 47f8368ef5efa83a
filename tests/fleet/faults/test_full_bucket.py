"""Tests of a fleet whose store is full: new requests are refused or wait, and running ones end."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.api import RefusedError
from shared.schemas import GenerateRequest
from tests.fleet.live import WAIT_S, ask, check, client_of, request_for, until_running
from tests.shared.store.bucket_sizes import resize

pytestmark = pytest.mark.asyncio(loop_scope="module")
RECEIVE_LIMIT_BYTES = 1_000_000
ASKED = {"prompt": 6000 * "x", "max_tokens": 8}  # a body of 24 KB


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    bound = {"SLACKLINE_ADMISSION_RECEIVE_LIMIT_BYTES": str(RECEIVE_LIMIT_BYTES)}
    async with Fleet(FleetSpec(replicas=1, pace=0.5, drain_s=2.0, environment=bound)) as fleet:
        yield fleet
        assert [c.name for c in fleet.processes if c.starts != 1] == []


@pytest_asyncio.fixture(loop_scope="module")
async def http(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S, trust_env=False) as http:
        yield http


async def test_a_full_bucket_refuses_at_once_and_what_was_accepted_ends(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    async with client_of(fleet) as (bus, client, wire):
        request = request_for(300, "long", prompt=200 * "x")
        running = asyncio.create_task(ask(client, request))
        await until_running(bus, "r1")
        await resize(bus._client, "KV_bodies", None)
        records = dict(await bus.requests.scan("s."))
        for number in range(5):
            began_s = time.monotonic()
            refused = await http.post(
                "/v1/completions", json=ASKED, headers={"idempotency-key": f"full-{number}"}
            )
            assert time.monotonic() - began_s < 1.0, "at once: a store that is silent takes 2 s"
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "slow_down")
            assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert dict(await bus.requests.scan("s.")).keys() == records.keys()
        assert len(await bus.bodies.scan("")) == 1
        assert not running.done()
        await check(bus, wire, [await running])
        assert await bus.bodies.scan("") == []
        await resize(bus._client, "KV_bodies", 1_000_000)
        again = await http.post(
            "/v1/completions", json=ASKED, headers={"idempotency-key": "full-0"}
        )
        assert again.status_code == 200, "a refused id is free"


@pytest.mark.parametrize(
    ("stream", "service", "says"),
    [("KV_requests", "admission", "store.unwritable"), ("acks-r1", "worker-r1", "ack.waits")],
)
async def test_where_records_or_acks_have_no_room_requests_wait_for_it(
    fleet: Fleet, stream: str, service: str, says: str
) -> None:
    async with client_of(fleet) as (bus, client, wire):
        request = request_for(300, f"waits-{service}")
        running = asyncio.create_task(ask(client, request))
        await until_running(bus, "r1")
        await resize(bus._client, stream, None)
        async with asyncio.timeout(WAIT_S):
            while says not in fleet.process(service).output():
                await asyncio.sleep(0.05)
        assert not running.done()
        await resize(bus._client, stream, 100_000_000)
        await check(bus, wire, [await running])


async def test_admission_reads_no_more_bytes_at_once_than_it_has_room_for(fleet: Fleet) -> None:
    each, number = 100_000, 30  # bytes of a prompt that no context takes; requests
    prompt = [200] * (each // 2)
    async with client_of(fleet) as (bus, client, _):

        async def code(n: int) -> str:
            request = GenerateRequest(request_id=f"wide-{n}", token_ids=prompt)
            with pytest.raises(RefusedError) as refused:
                await client.submit(request, "chat")
            return refused.value.refused.code

        admission = fleet.process("admission")
        admission.send(signal.SIGSTOP)
        asked = [asyncio.create_task(code(n)) for n in range(number)]
        await asyncio.sleep(0)  # each sends
        await bus.flush(WAIT_S)
        admission.send(signal.SIGCONT)
        codes = Counter(await asyncio.gather(*asked))
        assert set(codes) == {"context_length_exceeded", "slow_down"}
        assert codes["context_length_exceeded"] >= RECEIVE_LIMIT_BYTES // each - 1
        assert await code(number) == "context_length_exceeded", "there is room again"
