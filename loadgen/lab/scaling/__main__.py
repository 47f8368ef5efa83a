"""Laws of scaling side by side: `python -m loadgen.lab.scaling` prints the table of
docs/scaling.md.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
from msgspec import Struct

from loadgen.lab.scaling.days import DAYS, TIERS
from loadgen.lab.scaling.laws import Planner, QueueLength, Saturation, Timetable
from loadgen.lab.scaling.optimum import WINDOW_S, timetable
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.elastic.law import Law, OurLaw, Scaling
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from shared.policy import registry

PROFILE, MOST, BEGIN = "a100-llama3-70b-tp4", 12, 3
KEEPS = 0.99
DROWNED = 0.3
WARM_UPS_S = (30.0, 120.0, 300.0)
TRIES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the misses that may be, until the timetable keeps them
QUEUE = 0.5  # requests that wait, a replica: of 0.5 and 2 it costs less, on seed 1
LAWS: Mapping[str, Callable[[float], Law]] = {
    "ours": OurLaw,
    "HPA, queue": lambda _: QueueLength(QUEUE),
    "llm-d": lambda _: Saturation(),
    "Dynamo": lambda _: Planner(3.0, 0.15),
}


class Job(Struct, frozen=True, kw_only=True):
    day: str
    seed: int
    replicas: int = BEGIN
    law: str = ""  # none: `replicas` serve all the time
    warm_up_s: float = 0.0
    counts: tuple[tuple[float, int], ...] = ()  # a timetable in place of the law


class Outcome(Struct, frozen=True, kw_only=True):
    job: Job
    met: float
    hours: float
    misses: list[float]  # of the requests that came in each window
    requests: int
    most: int


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
    deployment = Deployment(
        registry.DEFAULT,
        PROFILE,
        job.counts[0][1] if job.counts else job.replicas,
        draft=0.0,
        facts=ReplicaFacts(max_slots=1024),
        scaling=scaling,
    )
    # one that drowns is not served to its end: what has not ended has missed
    options = RunOptions(most_missed=int(DROWNED * len(requests)))
    result = simulate(Traffic(requests, TIERS, job.seed), deployment, options)
    misses = np.zeros(math.ceil(requests[-1].arrival_s / WINDOW_S))
    for request, verdict in zip(requests, result.verdicts, strict=True):
        misses[int(request.arrival_s // WINDOW_S)] += verdict is None or not verdict.slo_met
    return Outcome(
        job=job,
        met=result.met_fraction,
        hours=result.replica_s / 3600,
        misses=misses.tolist(),
        requests=len(requests),
        most=max([count for _, count in result.counts], default=job.replicas),
    )


def fixed(pool: ProcessPoolExecutor, day: str, seed: int) -> dict[int, Outcome]:
    """The day with each fixed number of replicas, up to the first with which nothing misses."""
    found: dict[int, Outcome] = {}
    for first in range(1, MOST, 2):
        jobs = [Job(day=day, seed=seed, replicas=n) for n in (first, first + 1)]
        found |= {outcome.job.replicas: outcome for outcome in pool.map(run, jobs)}
        if not sum(found[first].misses):
            break
    return found


def best(statics: dict[int, Outcome], day: str, seed: int, warm_up_s: float) -> Outcome:
    """The optimum in hindsight (optimum.py)."""
    misses = {n: np.array(outcome.misses) for n, outcome in statics.items()}
    allowed = (1.0 - KEEPS) * statics[1].requests
    for part in TRIES:
        counts = tuple(timetable(misses, part * allowed, warm_up_s))
        outcome = run(Job(day=day, seed=seed, warm_up_s=warm_up_s, counts=counts))
        if outcome.met >= KEEPS:
            break
    return outcome


def rows(pool: ProcessPoolExecutor, day: str, seed: int) -> Iterator[str]:
    laws = {
        name: [
            pool.submit(run, Job(day=day, seed=seed, law=name, warm_up_s=warm_up_s))
            for warm_up_s in WARM_UPS_S
        ]
        for name in LAWS
    }
    for name, runs in laws.items():
        yield _row(day, name, [each.result() for each in runs])
    statics = fixed(pool, day, seed)
    enough = min(n for n, outcome in statics.items() if outcome.met >= KEEPS)
    yield _row(day, f"static: {enough}", [statics[enough]] * len(WARM_UPS_S))
    optima = [pool.submit(best, statics, day, seed, warm_up_s) for warm_up_s in WARM_UPS_S]
    yield _row(day, "optimum", [each.result() for each in optima])


def _row(day: str, law: str, outcomes: Sequence[Outcome]) -> str:
    cells = [f"{100 * outcome.met:.2f} %, {outcome.hours:.2f}" for outcome in outcomes]
    return f"| {day} | {law} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=11, help="nothing was chosen with 11")
    parser.add_argument("--day", action="append", choices=list(DAYS), help="default: all")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    heads = " | ".join(f"warm-up {warm_up_s:g} s" for warm_up_s in WARM_UPS_S)
    print(f"| day | law | {heads} |\n| --- | --- | --- | --- | --- |", flush=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        for day in args.day or DAYS:
            for row in rows(pool, day, args.seed):
                print(row, flush=True)


if __name__ == "__main__":
    main()
