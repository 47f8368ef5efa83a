"""Executes the laboratory's jobs in several processes. Each result is stored as its run ends."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.lab.papers.run import RunResult, execute
from loadgen.lab.papers.search import Job, next_run
from loadgen.lab.papers.store import Store
from loadgen.lab.papers.values import violated
from loadgen.trials.parallel import run_all


@dataclass(frozen=True, slots=True)
class Task:
    """One job. A call does the runs that are missing and prints a line for each."""

    table: str
    job: Job
    folder: Path
    file: Path

    def __call__(self) -> int:
        """Returns the number of runs that it did."""
        store, runs = Store(self.folder, self.file), 0
        while (run := next_run(self.job, store.get)) is not None:
            result = execute(run)
            store.put(result)
            runs += 1
            print(f"{self.table}: {summary(result)}", file=sys.stderr, flush=True)
        return runs


def summary(result: RunResult) -> str:
    """One line about a run that has ended."""
    run = result.run
    policy = " ".join((run.policy, *(f"{key}={value}" for key, value in run.settings.items())))
    if result.figures is None:
        outcome = f"over {100 * run.most_violated:g} % violated"
    else:
        outcome = f"{violated(result.figures):.2f} % violated"
    load = f"{run.workload} at {run.rate_rps:g} requests/s, {run.tiers.name}"
    return f"{policy}: {load}: {outcome} ({result.wall_s:.0f} s)"


def run(tasks: Sequence[Task], processes: int) -> None:
    for done, (number, _) in enumerate(run_all(tasks, processes), start=1):
        print(f"[{done}/{len(tasks)}] {tasks[number].table}", file=sys.stderr, flush=True)
