"""A fleet under ten times what it can serve, by NATS and HTTP, with short and long prompts: who is
told no and how fast, what becomes of important requests, memory, and the way back to normal.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import httpx

from loadgen.bench.figure import Figure, quantile, spread
from loadgen.bench.loaded import PROFILE, memory_now
from loadgen.bench.machine import Memory
from loadgen.fleet.child import Say
from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.load.send_http import events
from shared.bus.api import RefusedError
from shared.client.client import Client
from shared.clock import Clock
from shared.errors import SlacklineError
from shared.schemas import GenerateRequest, Sampling
from shared.vocabulary import FinishReason

PART = "overload"
TIER = "chat"
RATE_PER_S = 120.0  # ten times what two such replicas serve of these requests, and more
SHORT, LONG = (200, 40), (4000, 100)  # tokens of prompt and of answer
IMPORTANT_EVERY = 25  # requests of each way; one of them has twice the importance
REFUSED_AIM_S = 0.05
NORMAL_AIM_S = 10.0
CALM = 5  # short requests in a row, one a second, that meet their SLO: back to normal
NORMAL_LIMIT_S = 120.0
END_LIMIT_S = 300.0  # for what waits at the end


@dataclass(slots=True)
class Told:
    """One request of the flood, and what its caller was told."""

    by: str  # NATS, HTTP
    long: bool
    important: bool
    took_s: float = 0.0  # until the first answer
    end: str = "open"  # met, missed, served (HTTP does not say which), refused, or an error


@dataclass(slots=True)
class Flood:
    """The callers: one connection to NATS, and one client of the gateway."""

    client: Client
    http: httpx.AsyncClient
    rng: Random
    told: list[Told] = field(default_factory=list)

    async def run(self, seconds: float) -> list[asyncio.Task[None]]:
        """Send with Poisson arrivals for so long; returns the requests, of which some still run."""
        clock = asyncio.get_running_loop().time
        at_s, tasks = clock(), list[asyncio.Task[None]]()
        until_s = at_s + seconds
        while (at_s := at_s + self.rng.expovariate(RATE_PER_S)) < until_s:
            await asyncio.sleep(at_s - clock())
            n = len(self.told)
            one = Told("NATS" if n % 2 else "HTTP", n % 4 > 1, n // 2 % IMPORTANT_EVERY == 0)
            self.told.append(one)
            send = self._by_nats if n % 2 else self._by_http
            tasks.append(asyncio.create_task(send(one, n), name=f"flood.{n}"))
        return tasks

    async def _by_nats(self, one: Told, n: int) -> None:
        prompt_tokens, output_tokens = LONG if one.long else SHORT
        request = GenerateRequest(
            request_id=f"flood-{n}-{self.rng.getrandbits(32):08x}",
            prompt="x" * prompt_tokens,
            sampling=Sampling(max_tokens=output_tokens, ignore_eos=True),
            importance=2.0 if one.important else 1.0,
        )
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        try:
            handle = await self.client.submit(request, TIER)
            one.took_s = clock() - sent_s
            verdict = await handle.wait()
            good = verdict.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            one.end = ("met" if verdict.slo_met else "missed") if good else verdict.finish_reason
        except RefusedError as error:
            one.took_s = one.took_s or clock() - sent_s
            one.end = "refused" if error.refused.code == "slow_down" else error.refused.code
        except SlacklineError as error:
            one.end = type(error).__name__

    async def _by_http(self, one: Told, n: int) -> None:
        prompt_tokens, output_tokens = LONG if one.long else SHORT
        body = {
            "prompt": "x" * prompt_tokens, "max_tokens": output_tokens, "ignore_eos": True,
            "stream": True, "priority": int(one.important),
        }  # fmt: skip
        clock = asyncio.get_running_loop().time
        sent_s, last = clock(), b""
        try:
            async with self.http.stream(
                "POST", "/v1/completions", json=body, headers={"x-slackline-tier": TIER}
            ) as response:
                one.took_s = clock() - sent_s
                if response.status_code != httpx.codes.OK:
                    one.end = {429: "refused"}.get(response.status_code, str(response.status_code))
                    return
                async for last in events(response.aiter_bytes()):
                    if last.startswith(b'{"error"'):
                        one.end = json.loads(last)["error"]["code"]
            if one.end == "open":
                one.end = "served" if last == b"[DONE]" else "broke off"
        except httpx.HTTPError as error:
            one.end = type(error).__name__


async def measure(seconds: float, seed: int, say: Say) -> list[Figure]:
    """The figures of so many seconds of overload."""
    say("starting a fleet of two simulated engines")
    async with (
        Fleet(FleetSpec(profile=PROFILE, drain_s=1.0), say) as fleet,
        fleet.connect("slackline-bench") as bus,
        Client(bus, Clock()) as client,
        httpx.AsyncClient(
            base_url=fleet.http_url,
            timeout=httpx.Timeout(None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        ) as http,
    ):
        flood = Flood(client, http, Random(seed))
        memory: list[dict[str, Memory]] = []
        watch = asyncio.create_task(_watch(fleet, memory))
        say(f"{RATE_PER_S:g} requests a second for {seconds:g} s")
        tasks = await flood.run(seconds)
        say("the way back to normal")
        normal_s = await _until_normal(client, seed)
        _, running = await asyncio.wait(tasks, timeout=END_LIMIT_S) if tasks else ((), ())
        watch.cancel()
        for task in running:
            task.cancel()
        return [*_figures(flood.told, normal_s, seconds), *_memory(memory)]


async def _watch(fleet: Fleet, memory: list[dict[str, Memory]]) -> None:
    while True:
        memory.append(await asyncio.to_thread(memory_now, fleet))  # 20 ms and more
        await asyncio.sleep(1.0)


async def _until_normal(client: Client, seed: int) -> float | None:
    """Seconds until the first of CALM short requests in a row that meet their SLO was sent; None:
    it took longer than NORMAL_LIMIT_S.
    """
    clock = asyncio.get_running_loop().time
    began_s = clock()
    asked: list[tuple[float, asyncio.Task[bool]]] = []

    async def met(n: int) -> bool:
        request = GenerateRequest(
            request_id=f"after-{seed}-{n}-{began_s:.3f}".replace(".", "-"),
            prompt="x" * SHORT[0],
            sampling=Sampling(max_tokens=SHORT[1], ignore_eos=True),
        )
        try:
            return (await (await client.submit(request, TIER)).wait()).slo_met
        except SlacklineError:
            return False

    while clock() - began_s < NORMAL_LIMIT_S:
        asked.append((clock() - began_s, asyncio.create_task(met(len(asked)))))
        await asyncio.sleep(1.0)
        for first in range(len(asked) - CALM + 1):
            calm = [task for _, task in asked[first : first + CALM]]
            if all(task.done() and task.result() for task in calm):
                return asked[first][0]
    return None


def _figures(told: Sequence[Told], normal_s: float | None, seconds: float) -> list[Figure]:
    def share(some: Sequence[Told], *ends: str) -> float | None:
        return sum(one.end in ends for one in some) / len(some) if some else None

    served = [one for one in told if one.end in ("met", "missed", "served")]
    ends = Counter(one.end for one in told)
    figures = [
        Figure(
            part=PART,
            name="offered, in multiples of what was served",
            value=len(told) / len(served) if served else None,
            unit="x",
            note=f"{len(told) / seconds:.0f}/s; " + ", ".join(f"{n} {e}" for e, n in ends.items()),
        )
    ]
    for by in ("NATS", "HTTP"):
        took = [one.took_s for one in told if one.by == by and one.end == "refused"]
        figures += spread(PART, f"a refusal by {by}", took, "ms", p99=REFUSED_AIM_S)
    important = [one for one in told if one.important]
    by_nats = [one for one in important if one.by == "NATS"]
    figures += [
        Figure(
            part=PART, name="important requests that were refused", unit="%",
            value=share(important, "refused"), aim=0.0, note=f"of {len(important)}",
        ),
        Figure(
            part=PART, name="important requests by NATS that met their SLO", unit="%",
            value=share(by_nats, "met"), note=f"of {len(by_nats)}",
        ),
        Figure(
            part=PART, name="requests that did not end, or ended in another error", unit="",
            value=float(len(told) - len(served) - ends["refused"]), aim=0.0,
        ),
        Figure(part=PART, name="back to normal", value=normal_s, unit="s", aim=NORMAL_AIM_S),
    ]  # fmt: skip
    return figures


def _memory(samples: Sequence[Mapping[str, Memory]]) -> list[Figure]:
    """The most that each process had, and how it grew: the median of the last third of the time
    over that of the second.
    """
    figures = []
    for name in samples[0]:
        sizes = [
            float(sample[name].pss_bytes or sample[name].rss_bytes or 0)
            for sample in samples
            if name in sample
        ]
        third = len(sizes) // 3
        before, after = quantile(sizes[third : 2 * third], 0.5), quantile(sizes[2 * third :], 0.5)
        figures += [
            Figure(
                part="memory in overload", name=name, value=max(sizes), unit="MB",
                note="" if not before or not after else f"the last third {after / before:.2f} x "
                "the second",
            )
        ]  # fmt: skip
    return figures
