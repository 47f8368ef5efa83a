"""Tests of a fleet under load, each service of which is killed in turn: no accepted request is
lost, and no client gets a text that is not the log's.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import httpx
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.schemas import GenerateRequest
from tests.fleet.live import (
    WAIT_S,
    check,
    client_of,
    draw_requests,
    replay_of,
    under_load,
    until_idle,
    until_running,
)
from tests.fleet.processes import children_of
from tests.rings import slow_but

pytestmark = pytest.mark.asyncio(loop_scope="module")
SEED = 20_261_121
REQUESTS, DURING_S = 48, 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(
        FleetSpec(pace=0.5, store=tmp_path_factory.mktemp("fleet"), drain_s=2.0)
    ) as fleet:
        yield fleet


async def survive(
    fleet: Fleet,
    kill: Callable[[], object],
    seed: int,
    running: str = "",
    *,
    n: int = REQUESTS,
    output: tuple[int, int] = (40, 120),
) -> int:
    """Kill a process of a fleet under load, once the replica `running` runs a request.

    Returns how many requests needed another attempt, of those whose SLO a replica could hold.
    """
    print(f"seed {seed}")
    requests = draw_requests(seed, n, prompt=(5, 400), output=output)
    async with client_of(fleet) as (bus, client, wire):

        async def kill_when_running() -> None:
            if running:
                await until_running(bus, running)
            kill()

        delivered = await under_load(client, requests, DURING_S, kill_when_running)
        await check(bus, wire, delivered)
        await until_idle(bus, fleet.replicas)
    if fleet.failed.done():
        fleet.failed.result()
    return sum(
        one.request.slo is None and one.verdict is not None and one.verdict.attempts > 1
        for one in delivered
    )


@pytest.mark.parametrize(
    "name", slow_but(["planner"], ["planner", "admission", "relegation", "nats-server"])
)
async def test_nothing_is_lost_when_a_process_is_killed_under_load(fleet: Fleet, name: str) -> None:
    victim = fleet.process(name)
    starts = victim.starts
    await survive(fleet, victim.kill, SEED + len(name))
    assert victim.starts == starts + 1


async def test_requests_go_on_elsewhere_when_their_worker_is_killed(fleet: Fleet) -> None:
    assert await survive(fleet, fleet.process("worker-r1").kill, SEED + 1, "r1") > 0


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


@pytest.mark.slow
async def test_sampled_text_goes_on_without_a_splice_when_the_engine_of_a_torch_worker_is_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    spec = FleetSpec(engine="torch", profile="cpu-tiny", gateway=False, store=tmp_path, drain_s=2.0)
    async with Fleet(spec) as fleet:
        worker = fleet.process("worker-r1")
        starts = worker.starts

        def kill_its_engine() -> None:
            assert worker.pid is not None
            (engine,) = children_of(worker.pid, "services.worker.engine_process")
            os.kill(engine, signal.SIGKILL)

        assert await survive(fleet, kill_its_engine, SEED + 1, "r1", n=8, output=(100, 150)) > 0
        assert worker.starts == starts + 1
