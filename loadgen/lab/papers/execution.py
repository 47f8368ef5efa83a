"""The execution of the jobs that sections request, in several processes.

Each result is stored in the cache as soon as its run ends.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.lab.papers.cache import Cache
from loadgen.lab.papers.experiment import Run, RunResult, execute, violated_fraction
from loadgen.lab.papers.job import Job, next_run
from loadgen.trials.parallel import run_all


@dataclass(frozen=True, slots=True)
class Task:
    """One job of a section. A call does the runs that are missing and prints a line for each."""

    section: str
    job: Job
    folder: Path
    traces: Path | None

    @property
    def policy(self) -> str:
        """The policy of its runs, of a search with rivals that of the first."""
        return (self.job if isinstance(self.job, Run) else self.job.run).policy

    def __call__(self) -> int:
        """Returns the number of runs that it did."""
        cache, runs = Cache(self.folder), 0
        while (run := next_run(self.job, cache.get)) is not None:
            result = execute(run, self.traces)
            cache.put(result)
            runs += 1
            print(summary(self.section, result), file=sys.stderr, flush=True)
        return runs


def summary(section: str, result: RunResult) -> str:
    """One line about a run that has ended."""
    run = result.run
    policy = " ".join((run.policy, *(f"{key}={value}" for key, value in run.settings.items())))
    if result.bound is not None:
        outcome = f"at least {100 * result.bound.violated_fraction:.2f} % violated"
    elif result.figures is None:
        outcome = f"over {100 * run.most_violated:g} % violated"
    else:
        outcome = f"{100 * violated_fraction(result.figures):.2f} % violated"
    only = f", {run.only} alone" if run.only else ""
    return (
        f"{section}: {policy}: {run.workload} at {run.rate_rps:g} requests/s{only}, "
        f"{run.tiers.name}: {outcome} ({result.wall_s:.0f} s)"
    )


def pending(tasks: Sequence[Task]) -> list[Task]:
    """The tasks that have runs to do, each job once."""
    waiting: dict[str, Task] = {}
    for task in tasks:
        if next_run(task.job, Cache(task.folder).get) is not None:
            waiting.setdefault(repr(task.job), task)
    return list(waiting.values())


def run_tasks(tasks: Sequence[Task], processes: int) -> None:
    """Does the tasks that are pending."""
    waiting = pending(tasks)
    for done, (number, _) in enumerate(run_all(waiting, processes), start=1):
        print(f"[{done}/{len(waiting)}] {waiting[number].section}", file=sys.stderr, flush=True)
