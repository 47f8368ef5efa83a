"""Measures two replicas under a steady load: idle engines, lateness, CPU, memory."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TypeVar

from loadgen.bench.figure import Figure, quantile, spread
from loadgen.bench.live_fleet import Caller, Iteration, Observer, delta_figures
from loadgen.bench.machine import cpu_s, memory_bytes
from loadgen.fleet.child import Say
from loadgen.fleet.fleet import Fleet
from shared.client.client import Handle
from shared.errors import SlacklineError
from shared.perf import profile_file as profiles
from shared.perf.shape import BatchShape

PART = "under load"
IDLE_AIM = 0.01
ITERATION_S = 0.020
PROFILE = "a100-llama3-8b"
# Requests of each replica that decode throughout. The requests that arrive and end meanwhile are
# about 4 more.
DECODES = 24
PROMPT_TOKENS, LONGEST_OUTPUT = 300, 6000
ARRIVALS_PER_S, ARRIVAL_PROMPT, ARRIVAL_OUTPUT = 4.0, 120, 60
SAMPLE_S = 1.0  # between two samples of the memory
Number = TypeVar("Number", int, float)


def pace() -> float:
    """The pace at which an iteration of the steady decodes takes ITERATION_S."""
    shape = BatchShape(decodes=DECODES, decode_context=DECODES * 2 * PROMPT_TOKENS)
    return ITERATION_S / profiles.load(PROFILE).batch_s(shape)


async def measure(
    fleet: Fleet, caller: Caller, observer: Observer, settle_s: float, seconds: float, say: Say
) -> list[Figure]:
    """The figures of `seconds` of steady load.

    The load begins `settle_s` earlier, for the first prefills and the correction of the profile.
    """
    replicas = len(fleet.replicas)
    earlier = len(caller.requests)
    async with asyncio.TaskGroup() as group:
        steady = [
            group.create_task(_send(caller, PROMPT_TOKENS, LONGEST_OUTPUT, "interactive"))
            for _ in range(DECODES * replicas)
        ]
        arrivals = group.create_task(_arrive(caller, group))
        await asyncio.sleep(settle_s)
        began_unix_s, began_cpu_s = caller.clock.unix_s(), _cpu(fleet)
        peaks = dict[str, int]()
        while (left_s := began_unix_s + seconds - caller.clock.unix_s()) > 0:
            await asyncio.sleep(min(SAMPLE_S, left_s))
            for name, used_bytes in memory_now(fleet).items():
                peaks[name] = max(used_bytes, peaks.get(name, 0))
            say(f"  {seconds - max(left_s - SAMPLE_S, 0):.0f} of {seconds:.0f} s")
        ended_unix_s, ended_cpu_s = caller.clock.unix_s(), _cpu(fleet)
        arrivals.cancel()
        for task in steady:
            if (handle := await task) is not None:
                with suppress(SlacklineError):
                    await handle.cancel()
    window = [
        [
            iteration
            for iteration in iterations
            if iteration.ack.plan_seq and began_unix_s <= iteration.ack.ended_unix_s <= ended_unix_s
        ]
        for iterations in observer.iterations.values()
    ]
    late = [
        one
        for one in observer.late(caller.requests[earlier:])
        if began_unix_s <= one.received_unix_s <= ended_unix_s
    ]
    took_s = ended_unix_s - began_unix_s
    cores = {
        name: (ended_cpu_s[name] - at_s) / took_s
        for name, at_s in began_cpu_s.items()
        if name in ended_cpu_s
    }
    note = ", ".join(f"{name} {share:.0%}" for name, share in cores.items())
    return [
        *_engines(window),
        *delta_figures(PART, late),
        Figure(PART, "CPU of the fleet, in cores", sum(cores.values()), "", note=note),
        *memory_figures("memory under load", peaks),
    ]


def memory_figures(part: str, by_process: Mapping[str, int]) -> list[Figure]:
    return [Figure(part, name, used_bytes, "MB") for name, used_bytes in by_process.items()]


def memory_now(fleet: Fleet) -> dict[str, int]:
    """The bytes of each process that runs."""
    return _by_process(fleet, memory_bytes)


def _by_process(fleet: Fleet, of: Callable[[int], Number | None]) -> dict[str, Number]:
    found = {child.name: of(child.pid) for child in fleet.processes if child.pid is not None}
    return {name: value for name, value in found.items() if value is not None}


def _engines(window: Sequence[Sequence[Iteration]]) -> list[Figure]:
    """The engines' figures. The iterations of each engine follow one another without a break."""
    pairs = [(before.ack, now.ack) for iterations in window for before, now in pairwise(iterations)]
    took = [now.ended_unix_s - before.ended_unix_s for before, now in pairs]
    overhead = [length_s - now.exec_s for length_s, (_, now) in zip(took, pairs, strict=True)]
    between = [now.started_unix_s - before.ended_unix_s for before, now in pairs]
    lead = [
        now.ack.started_unix_s - now.plan_received_unix_s
        for iterations in window
        for now in iterations[1:]
        if now.plan_received_unix_s is not None
    ]
    entries = [len(now.slots) // 4 for _, now in pairs]
    idle = sum(now.idle_s for _, now in pairs) / sum(took) if took else None
    outside = sum(overhead) / sum(took) if took else None
    mean = sum(entries) / len(entries) if entries else None
    ahead = "plan here before its iteration began"
    return [
        Figure(PART, "engines idle for want of a plan", idle, "%", aim=IDLE_AIM),
        Figure(PART, "engines not computing, all told", outside, "%"),
        *spread(PART, "an iteration, from end to end", took),
        *spread(PART, "of it not the engine's own time", overhead),
        *spread(PART, "worker's work between two iterations", between),
        Figure(PART, f"{ahead}, p50", quantile(lead, 0.5), "ms"),
        Figure(PART, f"{ahead}, p1", quantile(lead, 0.01), "ms"),
        Figure(PART, "entries of an iteration, mean", mean, ""),
    ]


async def _send(caller: Caller, prompt_tokens: int, output_tokens: int, tier: str) -> Handle | None:
    """Submits a request; None: it was refused or not answered, so it has no figures."""
    with suppress(SlacklineError):
        return await caller.send(prompt_tokens, output_tokens, tier)
    return None


async def _arrive(caller: Caller, group: asyncio.TaskGroup) -> None:
    """Sends requests with Poisson arrivals until it is cancelled."""
    while True:
        await asyncio.sleep(caller.rng.expovariate(ARRIVALS_PER_S))
        group.create_task(_send(caller, ARRIVAL_PROMPT, ARRIVAL_OUTPUT, "chat"))


def _cpu(fleet: Fleet) -> dict[str, float]:
    """The CPU seconds that each process has used."""
    return _by_process(fleet, cpu_s)
