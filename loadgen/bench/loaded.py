"""Two replicas under a steady load, in iterations of 20 ms: idle engines, lateness, CPU, memory."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise

from loadgen.bench.figure import Figure, quantile, spread
from loadgen.bench.live_fleet import Caller, Iteration, Observer
from loadgen.bench.machine import Memory, cpu_s, memory_of
from loadgen.fleet.child import Say
from loadgen.fleet.fleet import Fleet
from shared.client.client import Handle
from shared.errors import SlacklineError
from shared.perf import profile_file as profiles
from shared.perf.shape import BatchShape
from shared.vocabulary import ReplicaId

PART = "under load"
IDLE_AIM = 0.01
DELTA_AIM_S = 0.002
ITERATION_S = 0.020
PROFILE = "a100-llama3-8b"
# Requests of each replica that decode throughout. The requests that arrive and end meanwhile are
# about 4 more.
DECODES = 24
PROMPT_TOKENS, LONGEST_OUTPUT = 300, 6000
ARRIVALS_PER_S, ARRIVAL_PROMPT, ARRIVAL_OUTPUT = 4.0, 120, 60
SAMPLE_S = 1.0  # between two samples of the memory


def pace() -> float:
    """The pace at which an iteration takes ITERATION_S.

    The iteration has the steady decodes and an occasional chunk of prefill.
    """
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
        peaks: dict[str, Memory] = {}
        while (left_s := began_unix_s + seconds - caller.clock.unix_s()) > 0:
            await asyncio.sleep(min(SAMPLE_S, left_s))
            for name, now in memory_now(fleet).items():
                peaks[name] = peaks.get(name, now).most(now)
            say(f"  {seconds - max(left_s - SAMPLE_S, 0):.0f} of {seconds:.0f} s")
        ended_unix_s, ended_cpu_s = caller.clock.unix_s(), _cpu(fleet)
        arrivals.cancel()
        for task in steady:
            if (handle := await task) is not None:
                with suppress(SlacklineError):
                    await handle.cancel()
    window = {
        replica: [
            iteration
            for iteration in iterations
            if iteration.ack.plan_seq and began_unix_s <= iteration.ack.ended_unix_s <= ended_unix_s
        ]
        for replica, iterations in observer.iterations.items()
    }
    generated = observer.generated_unix_s()
    late = [
        (offset, received_unix_s - generated[request.key, offset])
        for request in caller.requests[earlier:]
        for offset, received_unix_s in request.deltas
        if (request.key, offset) in generated and began_unix_s <= received_unix_s <= ended_unix_s
    ]
    figures = _engines(window)
    figures += spread(
        PART,
        "first delta after its iteration's end",
        [s for offset, s in late if offset == 0],
        "ms",
        p50=DELTA_AIM_S,
    )
    figures += spread(PART, "any delta after its iteration's end", [s for _, s in late], "ms")
    used = {
        name: ended_cpu_s[name] - at_s for name, at_s in began_cpu_s.items() if name in ended_cpu_s
    }
    share = sum(used.values()) / (ended_unix_s - began_unix_s)
    note = ", ".join(f"{name} {s / (ended_unix_s - began_unix_s):.0%}" for name, s in used.items())
    figures.append(
        Figure(part=PART, name="CPU of the fleet, in cores", value=share, unit="", note=note)
    )
    return figures + memory_figures("memory under load", peaks)


def memory_figures(part: str, by_process: dict[str, Memory]) -> list[Figure]:
    """The memory of each process: its PSS, or its RSS where the system reports no PSS.

    The sum of PSS counts shared pages once.
    """
    return [
        Figure(
            part=part,
            name=name,
            value=memory.pss_bytes or memory.rss_bytes,
            unit="MB",
            note=str(memory),
        )
        for name, memory in by_process.items()
    ]


def memory_now(fleet: Fleet) -> dict[str, Memory]:
    return {child.name: memory_of(child.pid) for child in fleet.processes if child.pid is not None}


def _engines(window: Mapping[ReplicaId, list[Iteration]]) -> list[Figure]:
    """The figures of the engines.

    The iterations of `window` follow one another without a break: the replicas have work
    throughout.
    """
    total_s = idle_s = 0.0
    took: list[float] = []
    overhead: list[float] = []
    between: list[float] = []
    lead: list[float] = []
    entries: list[int] = []
    for iterations in window.values():
        for before, now in pairwise(iterations):
            length_s = now.ack.ended_unix_s - before.ack.ended_unix_s
            total_s += length_s
            idle_s += now.ack.idle_s
            took.append(length_s)
            overhead.append(length_s - now.ack.exec_s)
            between.append(now.ack.started_unix_s - before.ack.ended_unix_s)
            entries.append(len(now.ack.slots) // 4)
            if now.plan_received_unix_s is not None:
                lead.append(now.ack.started_unix_s - now.plan_received_unix_s)
    mean = sum(entries) / len(entries) if entries else None
    return [
        Figure(
            part=PART,
            name="engines idle for want of a plan",
            value=idle_s / total_s if total_s else None,
            unit="%",
            aim=IDLE_AIM,
        ),
        Figure(
            part=PART,
            name="engines not computing, all told",
            value=sum(overhead) / total_s if total_s else None,
            unit="%",
        ),
        *spread(PART, "an iteration, from end to end", took, "ms"),
        *spread(PART, "of it not the engine's own time", overhead, "ms"),
        *spread(PART, "worker's work between two iterations", between, "ms"),
        Figure(
            part=PART,
            name="plan here before its iteration began, p50",
            value=quantile(lead, 0.5),
            unit="ms",
        ),
        Figure(
            part=PART,
            name="plan here before its iteration began, p1",
            value=quantile(lead, 0.01),
            unit="ms",
        ),
        Figure(part=PART, name="entries of an iteration, mean", value=mean, unit=""),
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
    used_s = {child.name: cpu_s(child.pid) for child in fleet.processes if child.pid is not None}
    return {name: seconds for name, seconds in used_s.items() if seconds is not None}
