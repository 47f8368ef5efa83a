"""Tests of a fleet under load whose processes leave, die and come back, one after another: no
request fails, and no client gets a token twice or misses one.

SLACKLINE_DRAINS=200 does two hundred of them, in seven minutes; `pytest -s` prints the
longest pause that a client saw, by what was done meanwhile.
"""

import asyncio
import json
import os
from bisect import bisect
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import httpx
import pytest

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.nats import NatsBus
from shared.client.client import Client
from shared.request_timeline import Cause
from shared.schemas import GenerateRequest, Sampling
from shared.subjects import DEFAULT_TENANT
from shared.vocabulary import FinishReason, Slo
from tests.fleet.api.test_why_late import explained, replica_of
from tests.fleet.live import (
    WAIT_S,
    Wire,
    ask,
    check,
    client_of,
    replay_of,
    request_for,
    until_ready,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
SEED = 20_261_130
TIMES = int(os.environ.get("SLACKLINE_DRAINS", "8"))
RATE = 5.0  # requests a second, half of them by HTTP
SPEC = FleetSpec(replicas=3, pace=0.5, drain_s=3.0)
PROMPT = "x" * 6000  # tokens
WORKERS = ("worker-r1", "worker-r2", "worker-r3")
OTHERS = ("planner", "admission", "relegation", "gateway", "nats-server")


@dataclass
class Seen:
    """The instants at which tokens came, by request, and what was done meanwhile."""

    heard_s: list[tuple[list[float], bool]] = field(
        default_factory=list
    )  # best-effort at some time
    done: list[tuple[str, float]] = field(default_factory=list)  # what, from

    def longest_pauses_s(self) -> dict[str, float]:
        """By what was done last before it ended: the longest time between two tokens."""
        longest: dict[str, float] = defaultdict(float)
        for times_s, best_effort in self.heard_s:
            for before_s, after_s in pairwise(times_s):
                done = bisect([from_s for _, from_s in self.done], after_s)
                what = self.done[done - 1][0] if done else "nothing"
                what += ", best-effort" if best_effort else ""
                longest[what] = max(longest[what], after_s - before_s)
        return longest


async def by_nats(bus: NatsBus, client: Client, wire: Wire, seen: Seen, rng: Random) -> None:
    """A request over NATS, compared with the log as soon as it has ended. Where it is refused,
    since too little of the fleet is left, the client asks anew.
    """
    sampling = Sampling(
        max_tokens=rng.randint(50, 250), temperature=rng.choice((0.0, 1.0)), ignore_eos=True
    )
    tier = rng.choice(("interactive", "chat", "batch"))
    while True:
        request = GenerateRequest(
            request_id=f"nats-{rng.getrandbits(64):x}",
            prompt="x" * rng.randint(20, 6000),
            sampling=sampling,
        )
        one = await ask(client, request, tier)
        if one.verdict is None or one.verdict.finish_reason is not FinishReason.REFUSED:
            break
        assert not one.tokens
        await asyncio.sleep(1.0)
    await check(bus, wire, [one])
    assert one.verdict is not None
    seen.heard_s.append((one.heard_s, one.verdict.relegated))


async def by_http(bus: NatsBus, http: httpx.AsyncClient, seen: Seen, rng: Random) -> None:
    """A streamed completion. A client whose stream is cut asks with the same id once more, and gets
    the text from its first token. One that is refused asks anew.
    """
    name, tokens = f"http-{rng.getrandbits(64):x}", rng.randint(50, 250)
    body = {
        "prompt": "x" * rng.randint(20, 6000),
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    loop, heard_s, text, whole = asyncio.get_running_loop(), list[float](), "", False
    while not whole:
        text, known = "", len(heard_s)
        try:
            async with http.stream(
                "POST", "/v1/completions", json=body, headers={"idempotency-key": name}
            ) as stream:
                if stream.status_code == httpx.codes.TOO_MANY_REQUESTS:
                    name = f"http-{rng.getrandbits(64):x}"
                    assert not heard_s, "refused after tokens came"
                async for line in stream.aiter_lines():
                    whole = whole or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            break
                        text += "".join(choice["text"] for choice in chunk["choices"])
                        known -= 1
                        if known < 0:
                            heard_s.append(loop.time())
        except httpx.HTTPError:
            pass
        if not whole:
            await asyncio.sleep(0.2)
    replay = await replay_of(bus, GenerateRequest(request_id=name))
    assert text == replay.text, name
    assert replay.verdict is not None and replay.verdict.output_tokens == tokens, name
    seen.heard_s.append((heard_s, replay.verdict.relegated))


@pytest.mark.slow
async def test_whoever_leaves_or_dies_no_request_is_lost_and_no_token_comes_twice(
    tmp_path: Path,
) -> None:
    print(f"seed {SEED}")
    rng, seen, stopped = Random(SEED), Seen(), asyncio.Event()
    async with (
        Fleet(replace(SPEC, store=tmp_path)) as fleet,
        client_of(fleet) as (bus, client, wire),
        httpx.AsyncClient(base_url=fleet.http_url, trust_env=False, timeout=WAIT_S) as http,
    ):

        async def load() -> None:
            async with asyncio.TaskGroup() as tasks:
                while not stopped.is_set():
                    of = Random(rng.getrandbits(64))
                    tasks.create_task(by_nats(bus, client, wire, seen, of))
                    tasks.create_task(by_http(bus, http, seen, of))
                    await asyncio.sleep(2 / RATE)

        async def disturb() -> None:
            loop = asyncio.get_running_loop()
            for number in range(TIMES):
                what, act = drawn(fleet, number, rng)
                await until_ready(bus, fleet.replicas)
                await asyncio.sleep(0.7)  # some load, not a state to wait for
                seen.done.append((what, loop.time()))
                await act()
            stopped.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load())
            tasks.create_task(disturb())
    print(f"{len(seen.heard_s)} requests, {len(seen.done)} times; longest pauses:")
    for what, pause_s in sorted(seen.longest_pauses_s().items()):
        print(f"  {what}: {pause_s:.2f} s")
    assert len(seen.done) == TIMES


@pytest.mark.slow
async def test_a_request_that_a_leaving_replica_moves_without_slack_says_why_it_was_late(
    tmp_path: Path,
) -> None:
    """Its prompt takes 2 s to compute, and it has a second to spare when its replica leaves."""
    spec = FleetSpec(pace=4.0, drain_s=3.0, store=tmp_path)
    async with Fleet(spec) as fleet, client_of(fleet) as (bus, client, wire):
        alone = await ask(client, request_for(20, "alone", prompt=PROMPT), "batch")
        first_s, last_s = alone.heard_s[0], alone.heard_s[-1]
        slo = Slo(
            ttft_s=first_s - alone.sent_s + 1.0,
            tbt_s=2 * (last_s - first_s) / (len(alone.tokens) - 1),
        )
        moved = asyncio.create_task(ask(client, request_for(200, "moved", prompt=PROMPT, slo=slo)))
        await wire.until_speaking(2)
        leaving = await replica_of(bus, "moved", DEFAULT_TENANT)
        await fleet.process(f"worker-{leaving}").stop(WAIT_S)
        verdict = (await moved).verdict
        assert verdict is not None and verdict.replica != leaving
        told = await explained(bus, "moved")
    assert told.first_missed is not None and told.first_missed.cause is Cause.MOVING, told.answer
    assert told.first_missed.token > 1
    assert f"moving to another replica from {leaving} (drained)" in told.answer


def drawn(fleet: Fleet, number: int, rng: Random) -> tuple[str, Callable[[], Awaitable[None]]]:
    """The next thing that happens: every second time a worker leaves, else something dies or is
    restarted.
    """
    if number % 2 == 0:
        name, leaves = rng.choice(WORKERS), True
    else:
        name, leaves = (*OTHERS, "worker-r1")[number // 2 % 6], number // 12 % 2 == 1
    child = fleet.process(name)

    async def act() -> None:
        if leaves:
            await child.restart()
        else:
            starts = child.starts
            child.kill()
            async with asyncio.timeout(WAIT_S):
                while child.starts == starts:
                    await asyncio.sleep(0.05)

    kind = "worker" if name in WORKERS else name
    return f"{kind} {'leaves' if leaves else 'is killed'}", act
