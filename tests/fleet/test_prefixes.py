"""Tests of live fleets whose prompts begin alike: a request goes to the replica that has its
beginning, whose planner expects what is found there; tenants share nothing unless they say so.
"""

import asyncio
import re

import httpx
import pytest

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.telemetry import conventions as names
from tests.fleet.documents import check_found
from tests.fleet.live import WAIT_S, ask, client_of, request_for

BEGINNING = "You are a careful assistant that answers in one sentence. " * 20
ROUNDS = 8


async def total(fleet: Fleet, name: str) -> float:
    """The sum of a metric over all planners and all replicas."""
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        pages = [
            (await http.get(url)).text
            for process, url in fleet.metrics.items()
            if process.startswith("planner")
        ]
    found = [re.findall(rf"^{name}{{.*}} ([0-9.e+]+)$", page, re.MULTILINE) for page in pages]
    return sum(float(value) for values in found for value in values)


@pytest.mark.parametrize("engine", ["sim", pytest.param("torch", marks=pytest.mark.slow)])
async def test_requests_that_begin_alike_go_where_their_beginning_is(engine: str) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    spec = FleetSpec(
        replicas=2,
        engine=engine,
        profile="cpu-tiny" if engine == "torch" else "",
        metrics=True,
        drain_s=2.0,
        environment={"SLACKLINE_WORKER_PREFIX_CACHING": "true"} if engine == "sim" else {},
    )
    async with Fleet(spec) as fleet, client_of(fleet) as (_, client, _), asyncio.timeout(WAIT_S):
        verdicts = []
        for n in range(ROUNDS):
            asked = request_for(4, prompt=f"{BEGINNING}Question {n}?")
            verdicts.append((await ask(client, asked)).verdict)
        cached = [verdict.cached_tokens for verdict in verdicts if verdict is not None]
        while await total(fleet, names.PREFIX_FOUND) < sum(cached):  # shown a moment later
            await asyncio.sleep(0.05)
        expected = await total(fleet, names.PREFIX_EXPECTED)
    assert len(cached) == ROUNDS
    # the first computes all; a router with a digest of a moment ago may send the second elsewhere
    assert cached[0] == 0 and sum(tokens > 300 for tokens in cached) >= ROUNDS - 2, cached
    assert expected == pytest.approx(sum(cached), rel=0.05), "the planners know what is kept"


@pytest.mark.slow
async def test_torch_engines_find_as_much_of_prompts_as_the_simulator_says() -> None:
    pytest.importorskip("torch")
    spec = FleetSpec(replicas=2, engine="torch", profile="cpu-tiny", drain_s=2.0)
    await check_found(spec, kv_blocks=256, block_tokens=16)
