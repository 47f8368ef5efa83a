"""Tests of requests that come while NATS servers elect a leader, and cannot store anything."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from shared import subjects
from shared.bus.api import RefusedError
from shared.client.client import Client, Patience
from shared.schemas import GenerateRequest, Received, Sampling
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

LEADERLESS = replace(CALM, store_lost=1.0)


def request(n: int) -> GenerateRequest:
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    return GenerateRequest(request_id=f"q{n}", token_ids=[40, 41], sampling=sampling)


async def began(seed: int = 1) -> World:
    world = World(Scene(policy="fcfs", faults=CALM), seed=seed)
    for name in ("admission-0", "planner-0", "relegation-0", "worker-r0"):
        world.start(name)
    await asyncio.sleep(5.0)
    return world


@pytest.mark.parametrize("seed", range(4))
@virtual()
async def test_a_gateways_requests_wait_for_the_leader_and_run(seed: int) -> None:
    """Elections of up to 5 s follow one another, with pauses as long; a gateway waits 10 s."""
    world, rng = await began(seed), Random(seed)
    bus = world.net.connect("gateway")
    async with Client(bus, world.net.clock, patience=Patience(submit_s=10.0)) as client:

        async def run(n: int) -> None:
            await asyncio.sleep(30 * rng.random())
            handle = await client.submit(request(n), "chat")
            assert (await handle.wait()).output_tokens == 4

        running = [asyncio.ensure_future(run(n)) for n in range(30)]
        for _ in range(3):
            world.net.faults = LEADERLESS
            await asyncio.sleep(5 * rng.random())
            world.net.faults = CALM
            await asyncio.sleep(5.0)
        await asyncio.gather(*running)


@pytest.mark.parametrize("without_s", [2.0, 4.0, 30.0])
@virtual()
async def test_whoever_asks_once_is_told_that_the_request_is_stored_or_that_it_may_not_be(
    without_s: float,
) -> None:
    world = await began()
    bus = world.net.connect("caller")
    world.net.faults = LEADERLESS
    subject = subjects.requests("default", "chat")
    asked = asyncio.ensure_future(bus.request(subject, request(0), Received, timeout_s=20.0))
    await asyncio.sleep(without_s)
    world.net.faults = CALM
    if without_s < 5.0:
        await asked
    else:
        with pytest.raises(RefusedError) as refused:
            await asked
        assert refused.value.refused.code == "server_is_overloaded"
        assert refused.value.refused.retry_after_s == 1.0
