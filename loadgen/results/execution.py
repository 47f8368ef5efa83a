"""Doing what the sections ask for: in several processes, each run kept as soon as it is made."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.lab.parallel import run_all
from loadgen.results.cache import Cache
from loadgen.results.experiment import Made, make, violated_fraction
from loadgen.results.job import Job, next_run


@dataclass(frozen=True, slots=True)
class Work:
    """One job of a section, from where it stopped to its end, told on stderr run by run."""

    section: str
    job: Job
    folder: Path
    traces: Path | None

    def __call__(self) -> int:
        """How many runs it made."""
        cache, count = Cache(self.folder), 0
        while (run := next_run(self.job, cache.get)) is not None:
            made = make(run, self.traces)
            cache.put(made)
            count += 1
            print(line(self.section, made), file=sys.stderr, flush=True)
        return count


def line(section: str, made: Made) -> str:
    run, found = made.run, made.figures
    served = " ".join((run.policy, *(f"{key}={value}" for key, value in run.settings.items())))
    if made.bound is not None:
        came = f"at least {100 * made.bound.violated_fraction:.2f} % violated"
    elif found is None:
        came = f"over {100 * run.most_violated:g} % violated"
    else:
        came = f"{100 * violated_fraction(found):.2f} % violated"
    only = f", {run.only} alone" if run.only else ""
    return f"{section}: {served}: {run.workload} at {run.rate_rps:g} requests/s{only}, {run.tiers.name}: {came} ({made.wall_s:.0f} s)"


def left(works: Sequence[Work]) -> list[Work]:
    """Those not done yet, each job once."""
    waiting: dict[str, Work] = {}
    for work in works:
        if next_run(work.job, Cache(work.folder).get) is not None:
            waiting.setdefault(repr(work.job), work)
    return list(waiting.values())


def do(works: Sequence[Work], jobs: int) -> None:
    """Those of them that are not done."""
    waiting = left(works)
    for done, (number, _) in enumerate(run_all(waiting, jobs), start=1):
        print(f"[{done}/{len(waiting)}] {waiting[number].section}", file=sys.stderr, flush=True)
