"""kill -9 of each service in turn, under load, on a real nats-server: no accepted request lost, no
text that is not the log's.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
)
from tests.fleet.processes import children_of

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
    disturb: Callable[[], None],
    seed: int,
    n: int,
    during_s: float,
    *,
    output: tuple[int, int],
) -> int:
    """How many requests that any replica could have held went on after another attempt."""
    print(f"seed {seed}")
    requests = draw_requests(seed, n, prompt=(5, 400), output=output)
    async with client_of(fleet.url) as (bus, client, wire):
        heard = await under_load(client, requests, during_s, disturb)
        await check(bus, wire, heard)
        await until_idle(bus, fleet.replicas)
    if fleet.failed.done():
        fleet.failed.result()
    return sum(
        one.request.slo is None and one.verdict is not None and one.verdict.attempts > 1
        for one in heard
    )


@pytest.mark.parametrize("name", ["planner", "admission", "relegation", "nats-server"])
async def test_nothing_is_lost_when_a_process_is_killed_under_load(fleet: Fleet, name: str) -> None:
    victim = fleet.process(name)
    starts = victim.starts
    await survive(fleet, victim.kill, SEED + len(name), REQUESTS, DURING_S, output=(40, 120))
    assert victim.starts == starts + 1


async def test_requests_go_on_elsewhere_when_their_worker_is_killed(fleet: Fleet) -> None:
    assert (
        await survive(
            fleet, fleet.process("worker-r1").kill, SEED + 1, REQUESTS, DURING_S, output=(40, 120)
        )
        > 0
    )


async def test_requests_go_on_elsewhere_when_their_worker_does_not_come_back(fleet: Fleet) -> None:
    victim = fleet.process("worker-r2")
    loop = asyncio.get_running_loop()

    def kill() -> None:
        victim.abandon()
        loop.call_later(6.0, victim.start)  # long after it was declared lost

    assert await survive(fleet, kill, SEED + 2, REQUESTS, DURING_S, output=(40, 120)) > 0


async def test_a_worker_that_slept_while_it_was_declared_lost_says_nothing_more(
    fleet: Fleet,
) -> None:
    victim = fleet.process("worker-r1")
    loop = asyncio.get_running_loop()

    def pause() -> None:
        victim.send(signal.SIGSTOP)
        loop.call_later(5.0, victim.send, signal.SIGCONT)

    assert await survive(fleet, pause, SEED + 3, REQUESTS, DURING_S, output=(40, 120)) > 0


async def test_nothing_is_lost_when_worker_and_planner_are_killed_together(fleet: Fleet) -> None:
    def kill() -> None:
        fleet.process("worker-r2").kill()
        fleet.process("planner").kill()

    await survive(fleet, kill, SEED + 4, REQUESTS, DURING_S, output=(40, 120))


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
        """Streams are cut: the same id again gives the text from its first token."""
        while True:
            text = ""
            try:
                headers = {"x-request-id": name}
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
        client_of(fleet.url) as (bus, _, _wire),
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
    async with Fleet(FleetSpec(engine="torch", gateway=False, store=folder, drain_s=2.0)) as fleet:
        yield fleet


async def test_sampled_text_of_a_real_model_goes_on_without_a_splice_when_its_worker_or_its_engine_is_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    async with torch_fleet(tmp_path) as fleet:
        assert (
            await survive(fleet, fleet.process("worker-r1").kill, SEED, 8, 1.5, output=(50, 90)) > 0
        )
        worker = fleet.process("worker-r2")
        starts = worker.starts

        def kill_its_engine() -> None:
            assert worker.pid is not None
            (engine,) = children_of(worker.pid)
            os.kill(engine, signal.SIGKILL)

        assert await survive(fleet, kill_its_engine, SEED + 1, 8, 1.5, output=(50, 90)) > 0
        assert worker.starts == starts + 1
