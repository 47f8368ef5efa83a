"""A job: a run, or a search for the capacity of a policy. One process does it, run after run."""

import math
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from loadgen.lab.papers.run import Run, RunResult, violated_fraction
from loadgen.load.workload import WORKLOADS
from loadgen.trials.goodput import DIGITS, next_rate

VIOLATIONS = 0.01  # QoServe section 4.1.2: at most 1 % of the requests
PRECISION = 0.03
STEP_DOWN = 0.85

Lookup = Callable[[Run], RunResult | None]  # a result that is in the cache


class Search(Struct, frozen=True, kw_only=True):
    """A search for the highest rate at which at most `violations` of the requests are violated.

    It ends within `precision` of that rate. It tries `run.rate_rps` first, then `step` times as
    much as long as that passes. Every rate has the same seed: the same requests, with their gaps
    scaled. With `rivals` it finds the highest rate at which any of the runs passes: they serve the
    same requests, and are tried in turn until one of them passes. A run is not tried above a rate
    at which it failed.
    """

    run: Run
    violations: float = VIOLATIONS
    precision: float = PRECISION
    rivals: tuple[Run, ...] = ()
    step: float = 2.0

    def at(self, run: Run, rate_rps: float) -> Run:
        return replace(run, rate_rps=rate_rps, most_violated=self.violations)


Job = Run | Search


def needs_trace(job: Job) -> bool:
    """True if the job reads a recorded trace. Traces are not part of the project."""
    run = job if isinstance(job, Run) else job.run
    return run.workload not in WORKLOADS


class Capacity(Struct, frozen=True, kw_only=True):
    """The result of a search: requests per second, and the run at that rate.

    The rate is 0, without a run, if even the lowest rate failed.
    """

    rate_rps: float
    result: RunResult | None


def next_run(job: Job, lookup: Lookup) -> Run | None:
    """The next run of the job that has no result yet; None: the job is done."""
    if isinstance(job, Run):
        return None if lookup(job) else job
    found = advance(job, lookup)
    return found if isinstance(found, Run) else None


def advance(search: Search, lookup: Lookup) -> Capacity | Run:
    """The capacity that the search found, or the run whose result it needs next."""
    passed: dict[float, RunResult | None] = {}  # [rate] the run that passed; None: all failed
    candidates = [search.run, *search.rivals]
    failed_rps = [math.inf] * len(candidates)  # [candidate] the lowest rate at which it failed
    order = list(range(len(candidates)))
    while (
        rate_rps := _next_rate(
            search, {rate: result is not None for rate, result in passed.items()}
        )
    ) is not None:
        passed[rate_rps] = None
        for n in order:
            if rate_rps >= failed_rps[n]:
                continue
            run = search.at(candidates[n], rate_rps)
            result = lookup(run)
            if result is None:
                return run
            figures = result.figures
            if figures is not None and violated_fraction(figures) <= search.violations:
                passed[rate_rps] = result
                order.remove(n)
                order.insert(0, n)  # try the candidate that passed first at the next rate
                break
            failed_rps[n] = rate_rps
    best_rps = max((rate for rate, result in passed.items() if result is not None), default=0.0)
    return Capacity(rate_rps=best_rps, result=passed.get(best_rps))


def _next_rate(search: Search, passed: Mapping[float, bool]) -> float | None:
    """The next rate to try; None: the search is done.

    As in loadgen/trials/goodput.py, with one difference. The first rate is near the capacity, so
    if it fails, a rate a little lower follows instead of half of it: a run that passes is not
    stopped early, so half the rate would be a long run that says little.
    """
    first = search.run
    if passed == {first.rate_rps: False}:
        return float(f"{STEP_DOWN * first.rate_rps:.{DIGITS}g}")
    if passed and all(passed.values()):
        return search.step * max(passed)
    return next_rate(passed, search.precision, first.rate_rps, 1 / first.duration_s)
