"""Tests of a live fleet that grows in a burst and shrinks after it, without a lost request."""

import asyncio
import sys
from collections.abc import Callable
from random import Random

import httpx
import pytest
from msgspec.structs import replace

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.schemas import GenerateRequest, ReplicasNeeded
from shared.vocabulary import FinishReason, Slo
from tests.fleet.live import ask, check, client_of, request_for

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SEED = 20_261_121
SLO = Slo(ttft_s=60.0, tbt_s=1.0)  # of a burst that one replica has to begin with
REQUESTS, BURST_S = 120, 30.0
WITHIN_S = 120.0  # the longest that a busy machine may take for anything


async def until(
    true: Callable[[], bool], within_s: float, seen: Callable[[], object] = str
) -> None:
    """Wait until it is true; if it never is, say what was seen."""
    try:
        async with asyncio.timeout(within_s):
            while not true():
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"{seen()}")


async def test_a_fleet_grows_in_a_burst_and_shrinks_after_it_and_loses_nothing() -> None:
    said: list[str] = []
    spec = FleetSpec(
        replicas=1,
        most=3,
        profile="a100-llama3-8b",
        pace=4.0,  # a quarter of an A100: a small burst is too much for one
        metrics=True,
        environment={"SLACKLINE_RELEGATION_WARM_UP_S": "3"},
    )
    rng = Random(SEED)
    requests: list[GenerateRequest] = [
        request_for(20, prompt="a" * rng.randint(1000, 2000), slo=SLO) for _ in range(REQUESTS)
    ]
    heard: list[ReplicasNeeded] = []
    async with Fleet(spec, said.append) as fleet, client_of(fleet) as (bus, client, wire):
        assert sorted(fleet.running) == ["r1"]
        await bus.subscribe(
            subjects.SCALING, ReplicasNeeded, lambda needed, _: heard.append(needed)
        )
        async with asyncio.TaskGroup() as tasks:
            asking = []
            for request in requests:
                asking.append(tasks.create_task(ask(client, request, "chat", WITHIN_S)))
                await asyncio.sleep(BURST_S / REQUESTS)
            await until(lambda: len(fleet.running) > 1, WITHIN_S, lambda: (said, heard[-1:]))
            shown, told = await metric(fleet), await explained(fleet)
        delivered = [task.result() for task in asking]
        await check(bus, wire, delivered)
        served = {one.verdict.replica for one in delivered if one.verdict is not None}
        assert len(served) > 1, said
        assert all(
            one.verdict is not None and one.verdict.finish_reason == FinishReason.LENGTH
            for one in delivered
        )
        assert shown > 1
        assert "replicas needed" in told
        assert "chat and what is due sooner" in " ".join(told.split())
        asked = max(heard, key=lambda needed: needed.replicas)
        assert asked.tier == "chat"
        assert "s of work come each second" in asked.why
        # requests run while replicas leave; relegation would need its 300 s to forget the burst
        await fleet.process("relegation").stop(WITHIN_S)
        late = [request_for(300, prompt="b" * 50, slo=SLO) for _ in range(6)]
        asking = [asyncio.create_task(ask(client, each, "chat", WITHIN_S)) for each in late]
        await bus.publish(subjects.SCALING, replace(heard[-1], replicas=1))
        await until(lambda: len(fleet.running) == 1, WITHIN_S, lambda: (said, heard[-1:]))
        await check(bus, wire, [await each for each in asking])
        assert any("drains" in line for line in said)
        assert not any("killed" in line for line in said)


async def explained(fleet: Fleet) -> str:
    """The answer of `slackline explain --scale`."""
    access = fleet.access()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", "explain", "--scale", "--url", access.url,
        "--creds", access.creds, "--tls-ca", access.tls_ca, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def metric(fleet: Fleet) -> float:
    """The most that relegation exports as needed."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(fleet.metrics["relegation"])).text
    lines = [line for line in text.splitlines() if line.startswith("slackline_replicas_needed{")]
    return max(float(line.rpartition(" ")[2]) for line in lines)
