"""Laws of scaling side by side: `python -m loadgen.lab.scaling` prints the table of
docs/scaling.md.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from loadgen.lab.scaling.days import DAYS, Requests
from loadgen.lab.scaling.optimum import Misses, joined, timetable
from loadgen.lab.scaling.runs import LAWS, MOST, Job, Outcome, fixed, parts, run

KEEPS = 0.99
WARM_UPS_S = (30.0, 120.0, 300.0)
TRIES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the misses that may be, until the timetable keeps them
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
    pieces = [pool.submit(fixed, day, seed, part) for part in range(parts(day, seed))]
    misses = joined([each.result() for each in pieces], MOST)
    optima = [pool.submit(best, misses, day, seed, warm_up_s) for warm_up_s in WARM_UPS_S]
    yield _row(day, *enough(misses, DAYS[day](seed)))
    yield _row(day, "optimum", [each.result() for each in optima])


def enough(misses: Misses, requests: Requests) -> tuple[str, list[Outcome]]:
    """The fewest fixed replicas that keep the objective."""
    missed = {count: each.sum() / len(requests) for count, each in misses.items()}
    count = min(count for count, part in missed.items() if part <= 1.0 - KEEPS)
    hours = count * requests[-1].arrival_s / 3600
    return f"static: {count}", [Outcome(met=1.0 - missed[count], hours=hours)] * len(WARM_UPS_S)


def best(misses: Misses, day: str, seed: int, warm_up_s: float) -> Outcome:
    """The optimum in hindsight (optimum.py)."""
    allowed = (1.0 - KEEPS) * len(DAYS[day](seed))
    for part in TRIES:
        counts = tuple(timetable(misses, part * allowed, warm_up_s))
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
