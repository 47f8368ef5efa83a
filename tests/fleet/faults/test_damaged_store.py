"""Tests of damaged or missing values in a fleet's store: clients get errors that say so."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.api import KeyValue
from shared.client.client import Client, Patience
from shared.schemas import GenerateRequest, Sampling
from tests.fleet.live import WAIT_S, client_of
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(FleetSpec(replicas=1, pace=0.5, drain_s=2.0)) as fleet:
        yield fleet


async def damage(bucket: KeyValue, prefix: str) -> None:
    """Invert the last byte of the value whose key begins with `prefix`."""
    ((key, entry),) = await bucket.scan(prefix)
    await bucket.update(key, entry.value[:-1] + bytes([entry.value[-1] ^ 255]), entry.revision)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_is_damaged_in_the_store_is_an_error(fleet: Fleet) -> None:
    async with (
        httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S, trust_env=False) as http,
        client_of(fleet) as (bus, _, _),
    ):

        async def post() -> httpx.Response:
            asked = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
            return await http.post(
                "/v1/completions", json=asked, headers={"idempotency-key": "answered"}
            )

        first = await post()
        assert (await post()).json()["choices"] == first.json()["choices"]
        await damage(bus.requests, "o.default.answered.")
        again = await post()
        error = again.json()["error"]
        assert (again.status_code, error["code"]) == (500, "server_error")
        assert "damaged in the store: its checksum" in error["message"]


@virtual()
async def test_a_request_whose_prompt_is_gone_ends_and_says_so() -> None:
    world = World(Scene(faults=CALM), seed=1)
    for name in ("admission-0", "planner-0", "relegation-0"):
        world.start(name)
    patience = Patience(give_up_s=600.0, submit_s=60.0)
    async with Client(world.net.connect("clients"), world.net.clock, patience=patience) as one:
        handle = await one.submit(
            GenerateRequest(request_id="q", token_ids=200 * [40], sampling=Sampling(max_tokens=5)),
            "chat",
        )
        now_s = world.net.loop.time
        ((key, _),) = world.net.bodies.scan("default.q.", now_s=now_s())
        world.net.bodies.delete(key, now_s=now_s())
        world.start("worker-r0")
        async with asyncio.timeout(60.0):
            verdict = await handle.wait()
        assert verdict.finish_reason == "failed"
        assert verdict.message == f"{key} is missing from the store"
