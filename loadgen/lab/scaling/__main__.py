"""Laws of scaling side by side: `python -m loadgen.lab.scaling` prints the table of
docs/scaling.md.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from loadgen.lab.scaling.days import DAYS, TIERS
from loadgen.lab.scaling.optimum import fluid, timetable
from loadgen.lab.scaling.runs import BEGIN, LAWS, MOST, PROFILE, Job, Outcome, run
from shared.perf.profile_file import load
from shared.policy.slackline.prices import prices_of

KEEPS = 0.99
WARM_UPS_S = (30.0, 120.0, 300.0)
SPEEDS = (0.9, 0.85, 0.8, 0.75, 0.7)  # of the fluid, until the timetable keeps the objective
HINDSIGHT = "static and optimum"


def rows(pool: ProcessPoolExecutor, day: str, seed: int, laws: Sequence[str]) -> Iterator[str]:
    runs = {
        name: [
            pool.submit(run, Job(day=day, seed=seed, law=name, warm_up_s=warm_up_s))
            for warm_up_s in WARM_UPS_S
        ]
        for name in laws
        if name in LAWS
    }
    for name, futures in runs.items():
        yield _row(day, name, [each.result() for each in futures])
    if HINDSIGHT not in laws:
        return
    optima = [pool.submit(best, day, seed, warm_up_s) for warm_up_s in WARM_UPS_S]
    yield _row(day, "optimum", [each.result() for each in optima])
    static = pool.submit(enough, day, seed).result()
    yield _row(day, f"static: {static.job.replicas}", [static] * len(WARM_UPS_S))


def enough(day: str, seed: int) -> Outcome:
    """The fewest fixed replicas that keep the objective."""
    for replicas in range(BEGIN, MOST):
        outcome = run(Job(day=day, seed=seed, replicas=replicas))
        if outcome.met >= KEEPS:
            break
    return outcome


def best(day: str, seed: int, warm_up_s: float) -> Outcome:
    """The optimum in hindsight (optimum.py)."""
    requests, prices = DAYS[day](seed), prices_of(load(PROFILE))
    for speed in SPEEDS:
        misses = fluid(requests, TIERS, prices, speed, MOST)
        counts = tuple(timetable(misses, (1.0 - KEEPS) * len(requests), warm_up_s))
        outcome = run(Job(day=day, seed=seed, warm_up_s=warm_up_s, counts=counts))
        if outcome.met >= KEEPS:
            break
    return outcome


def _row(day: str, law: str, outcomes: Sequence[Outcome]) -> str:
    cells = [f"{100 * outcome.met:.2f} %, {outcome.hours:.2f}" for outcome in outcomes]
    return f"| {day} | {law} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=11, help="nothing was chosen with 11")
    parser.add_argument("--day", action="append", choices=list(DAYS), help="default: all")
    laws = [*LAWS, HINDSIGHT]
    parser.add_argument("--law", action="append", choices=laws, help="default: all")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    heads = " | ".join(f"warm-up {warm_up_s:g} s" for warm_up_s in WARM_UPS_S)
    print(f"| day | law | {heads} |\n| --- | --- | --- | --- | --- |", flush=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        for day in args.day or DAYS:
            for row in rows(pool, day, args.seed, args.law or laws):
                print(row, flush=True)


if __name__ == "__main__":
    main()
