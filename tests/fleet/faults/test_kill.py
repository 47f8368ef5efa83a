"""SIGKILL for each service in turn, under load, on a real nats-server: no accepted request is lost,
and no client gets a text that is not the log's.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
import pytest_asyncio

from loadgen.fleet.child import Child
from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.bus.api import Call
from shared.schemas import GenerateRequest, Offer
from shared.store.records import Records
from shared.vocabulary import RecordState, ReplicaId
from tests.fleet.live import (
    HOPELESS,
    WAIT_S,
    Wire,
    ask,
    check,
    client_of,
    draw_requests,
    replay_of,
    request_for,
    under_load,
    until_idle,
    until_running,
)
from tests.fleet.processes import children_of
from tests.rings import slow_but

pytestmark = pytest.mark.asyncio(loop_scope="module")
SEED = 20_261_121
REQUESTS, DURING_S = 48, 2.0
POOLED = 200  # more than two replicas are handed at once
# how a test disturbs a fleet, given what its client receives
Disturb = Callable[[Wire], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(
        FleetSpec(pace=0.5, store=tmp_path_factory.mktemp("fleet"), drain_s=2.0)
    ) as fleet:
        yield fleet


async def survive(
    fleet: Fleet,
    disturb: Disturb,
    seed: int,
    n: int = REQUESTS,
    during_s: float = DURING_S,
    *,
    output: tuple[int, int] = (40, 120),
    victim: str = "",
) -> int:
    """Disturb a fleet under load, once the replica `victim` runs a request.

    Returns how many requests went on after another attempt, of those that any replica could hold.
    """
    print(f"seed {seed}")
    requests = draw_requests(seed, n, prompt=(5, 400), output=output)
    async with client_of(fleet) as (bus, client, wire):

        async def disturb_when_running() -> None:
            if victim:
                await until_running(bus, victim)
            await disturb(wire)

        delivered = await under_load(client, requests, during_s, disturb_when_running)
        await check(bus, wire, delivered)
        await until_idle(bus, fleet.replicas)
    if fleet.failed.done():
        fleet.failed.result()
    return sum(
        one.request.slo is None and one.verdict is not None and one.verdict.attempts > 1
        for one in delivered
    )


def kill(*victims: Child) -> Disturb:
    async def disturb(_: Wire) -> None:
        for victim in victims:
            victim.kill()

    return disturb


@pytest.mark.parametrize(
    "name", slow_but(["planner"], ["planner", "admission", "relegation", "nats-server"])
)
async def test_nothing_is_lost_when_a_process_is_killed_under_load(fleet: Fleet, name: str) -> None:
    victim = fleet.process(name)
    starts = victim.starts
    await survive(fleet, kill(victim), SEED + len(name))
    assert victim.starts == starts + 1


@pytest.mark.slow
async def test_nothing_is_lost_when_relegation_is_killed_in_the_middle_of_handing_out(
    fleet: Fleet,
) -> None:
    """A fleet without standard requests is handed dozens at once. Relegation is killed when the
    first of their offers goes out: often some places are named and not offered yet.
    """
    relegation = fleet.process("relegation")
    starts = relegation.starts
    requests = [request_for(8, f"pooled-{n}", slo=HOPELESS) for n in range(POOLED)]
    async with client_of(fleet) as (bus, client, wire), asyncio.timeout(WAIT_S):
        records = Records(bus.requests, bus.bodies)
        offered: list[Offer] = []
        killed = asyncio.Event()

        def kill_it(offer: Offer, _: Call) -> None:
            if not killed.is_set():
                relegation.kill()
                killed.set()
            offered.append(offer)

        relegation.send(signal.SIGSTOP)
        running = [asyncio.create_task(ask(client, request)) for request in requests]
        while await pooled(records) < POOLED:
            await asyncio.sleep(0.05)
        every = subjects.offer(ReplicaId(subjects.EVERY))
        offers = await bus.subscribe(every, Offer, kill_it)
        relegation.send(signal.SIGCONT)
        await killed.wait()
        left = await pooled(records)
        print(f"{left} in the pool, {POOLED - left} handed out, {len(offered)} of these offered")
        assert left > 0, "all was handed out before"
        await offers.stop()
        await check(bus, wire, await asyncio.gather(*running))
        assert relegation.starts == starts + 1
        await until_idle(bus, fleet.replicas)


async def pooled(records: Records) -> int:
    """The number of requests in the best-effort pool, by their records."""
    return sum(one.record.state is RecordState.RELEGATED for one in await records.open())


async def test_requests_go_on_elsewhere_when_their_worker_is_killed(fleet: Fleet) -> None:
    assert await survive(fleet, kill(fleet.process("worker-r1")), SEED + 1, victim="r1") > 0


@pytest.mark.slow
async def test_requests_go_on_elsewhere_when_their_worker_does_not_come_back(fleet: Fleet) -> None:
    worker = fleet.process("worker-r2")

    async def abandon(wire: Wire) -> None:
        worker.abandon()
        await wire.replaced.wait()
        await asyncio.sleep(1.0)
        worker.start()

    assert await survive(fleet, abandon, SEED + 2, victim="r2") > 0


async def test_a_worker_that_slept_while_it_was_declared_lost_says_nothing_more(
    fleet: Fleet,
) -> None:
    worker = fleet.process("worker-r1")

    async def pause(wire: Wire) -> None:
        worker.send(signal.SIGSTOP)
        await wire.replaced.wait()
        worker.send(signal.SIGCONT)

    assert await survive(fleet, pause, SEED + 3, victim="r1") > 0


@pytest.mark.slow
async def test_nothing_is_lost_when_worker_and_planner_are_killed_together(fleet: Fleet) -> None:
    await survive(fleet, kill(fleet.process("worker-r2"), fleet.process("planner")), SEED + 4)


async def test_a_client_of_a_killed_gateway_attaches_by_its_id_and_reads_the_whole_text(
    fleet: Fleet,
) -> None:
    print(f"seed {SEED}")
    rng = Random(SEED)
    ids = [f"http-{SEED}-{i}" for i in range(20)]
    bodies = {
        name: {
            "prompt": "x" * rng.randint(5, 300),
            "max_tokens": rng.randint(60, 200),
            "ignore_eos": True,
        }
        for name in ids
    }

    async def complete(http: httpx.AsyncClient, name: str) -> str:
        """Ask with the same id after each cut stream: it gives the text from its first token."""
        while True:
            text = ""
            try:
                headers = {"idempotency-key": name}
                async with http.stream(
                    "POST", "/v1/completions", json=bodies[name] | {"stream": True}, headers=headers
                ) as stream:
                    async for line in stream.aiter_lines():
                        if line == "data: [DONE]":
                            return text
                        if line.startswith("data: {") and "error" not in (
                            chunk := json.loads(line.removeprefix("data: "))
                        ):
                            text += "".join(choice["text"] for choice in chunk["choices"])
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)

    async with (
        client_of(fleet) as (bus, _, _wire),
        httpx.AsyncClient(base_url=fleet.http_url, trust_env=False, timeout=WAIT_S) as http,
    ):
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            running = {}
            for i, name in enumerate(ids):
                if i == len(ids) // 2:
                    fleet.process("gateway").kill()
                running[name] = tasks.create_task(complete(http, name))
                await asyncio.sleep(0.05)
        for name, task in running.items():
            replay = await replay_of(bus, GenerateRequest(request_id=name))
            assert task.result() == replay.text, name
            assert replay.verdict is not None


@asynccontextmanager
async def torch_fleet(folder: Path) -> AsyncIterator[Fleet]:
    spec = FleetSpec(engine="torch", profile="cpu-tiny", gateway=False, store=folder, drain_s=2.0)
    async with Fleet(spec) as fleet:
        yield fleet


@pytest.mark.slow
async def test_sampled_text_goes_on_without_a_splice_when_a_torch_worker_or_its_engine_is_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    async with torch_fleet(tmp_path) as fleet:
        moved = await survive(
            fleet, kill(fleet.process("worker-r1")), SEED, 8, 1.5, output=(100, 150), victim="r1"
        )
        assert moved > 0
        worker = fleet.process("worker-r2")
        starts = worker.starts

        async def kill_its_engine(_: Wire) -> None:
            assert worker.pid is not None
            (engine,) = children_of(worker.pid, "services.worker.engine_process")
            os.kill(engine, signal.SIGKILL)

        moved = await survive(
            fleet, kill_its_engine, SEED + 1, 8, 1.5, output=(100, 150), victim="r2"
        )
        assert moved > 0
        assert worker.starts == starts + 1
