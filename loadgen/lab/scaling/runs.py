"""Runs of a day in the simulator: by a law, by a timetable, and with fixed numbers of replicas."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.lab.scaling.days import DAYS, TIERS
from loadgen.lab.scaling.laws import Planner, QueueLength, Saturation, Timetable
from loadgen.lab.scaling.optimum import WINDOW_S
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.elastic.law import Law, OurLaw, Scaling
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.policy import registry

PROFILE, MOST, BEGIN = "a100-llama3-70b-tp4", 12, 3
DROWNED = 0.3
QUEUE = 0.5  # requests that wait, a replica: of 0.5 and 2 it costs less, on seed 1
LAWS: Mapping[str, Callable[[float], Law]] = {
    "ours": OurLaw,
    "HPA, queue": lambda _: QueueLength(QUEUE),
    "llm-d": lambda _: Saturation(),
    "Dynamo": lambda _: Planner(3.0, 0.15),
}
PART_S, LEAD_S = 900.0, 300.0


class Job(Struct, frozen=True, kw_only=True):
    day: str
    seed: int
    replicas: int = BEGIN
    law: str = ""  # none: `replicas` serve all the time
    warm_up_s: float = 0.0
    counts: tuple[tuple[float, int], ...] = ()  # a timetable in place of the law


class Outcome(Struct, frozen=True, kw_only=True):
    met: float
    hours: float


def run(job: Job) -> Outcome:
    requests = DAYS[job.day](job.seed)
    scaling = None
    if job.counts:
        table = partial(Timetable, job.counts, job.warm_up_s)
        scaling = Scaling(law=table, most=MOST, warm_up_s=job.warm_up_s)
    elif job.law:
        scaling = Scaling(
            law=partial(LAWS[job.law], job.warm_up_s), most=MOST, warm_up_s=job.warm_up_s
        )
    begin = job.counts[0][1] if job.counts else job.replicas
    result = _served(Traffic(requests, TIERS, job.seed), begin, DROWNED, scaling)
    return Outcome(met=result.met_fraction, hours=result.replica_s / 3600)


def _served(
    traffic: Traffic, replicas: int, drowned: float, scaling: Scaling | None = None
) -> SimulationResult:
    """One that drowns is not served to its end: what has not ended has missed."""
    deployment = Deployment(
        registry.DEFAULT,
        PROFILE,
        replicas,
        draft=0.0,
        facts=ReplicaFacts(max_slots=1024),
        scaling=scaling,
    )
    options = RunOptions(most_missed=int(drowned * len(traffic.requests)))
    return simulate(traffic, deployment, options)


def parts(day: str, seed: int) -> int:
    return math.ceil(DAYS[day](seed)[-1].arrival_s / PART_S)


def fixed(day: str, seed: int, part: int) -> dict[int, NDArray[np.float64]]:
    """The requests that miss in each window of this part of the day, by the number of replicas: all
    numbers between one that drowns and one with which nothing misses. The replicas serve the part
    and what comes LEAD_S before it.
    """
    from_s, begin_s = part * PART_S, max(part * PART_S - LEAD_S, 0.0)
    requests = [
        request._replace(number=n, arrival_s=request.arrival_s - begin_s)
        for n, request in enumerate(
            each for each in DAYS[day](seed) if begin_s <= each.arrival_s < from_s + PART_S
        )
    ]
    windows = int(PART_S / WINDOW_S)
    if not requests:
        return {1: np.zeros(windows)}
    found: dict[int, NDArray[np.float64]] = {}

    def drowns(n: int) -> bool:
        verdicts = _served(Traffic(requests, TIERS, seed), n, DROWNED).verdicts
        missed = [verdict is None or not verdict.slo_met for verdict in verdicts]
        found[n] = np.zeros(windows)
        for request, late in zip(requests, missed, strict=True):
            window = int((request.arrival_s + begin_s - from_s) // WINDOW_S)
            if window >= 0:
                found[n][window] += late
        return sum(missed) > DROWNED * len(requests)

    n = BEGIN
    while n >= 1 and not drowns(n):
        n -= 1
    n = max(found)
    while found[n].any() and n < MOST:
        n += 1
        drowns(n)
    return found
