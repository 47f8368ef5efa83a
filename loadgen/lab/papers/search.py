"""A job of the laboratory, done by one process: a run, or a search for a policy's capacity."""

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from loadgen.lab.papers.run import Run, RunResult, violated_fraction
from loadgen.trials.goodput import DIGITS, next_rate

VIOLATIONS = 0.01  # QoServe section 4.1.2: at most 1 % of the requests
PRECISION = 0.03
STEP_DOWN = 0.85

Lookup = Callable[[Run], RunResult | None]  # a result that is in the cache


class Search(Struct, frozen=True, kw_only=True):
    """A search for the highest rate at which at most `violations` of the requests are violated.

    The search ends within `precision` of that rate. It tries `run.rate_rps` first, then rates that
    grow by `step` while they pass. Every rate has the same seed: the same requests, with their
    gaps scaled.
    """

    run: Run
    violations: float = VIOLATIONS
    precision: float = PRECISION
    step: float = 2.0


Job = Run | Search


def next_run(job: Job, lookup: Lookup) -> Run | None:
    """The next run of the job that has no result yet; None: the job is done."""
    if isinstance(job, Run):
        return None if lookup(job) else job
    found = advance(job, lookup)
    return found if isinstance(found, Run) else None


def advance(search: Search, lookup: Lookup) -> float | Run:
    """The capacity that the search found, in requests per second, or the run whose result it needs
    next. The capacity is 0 if even the lowest rate failed.
    """
    passed: dict[float, bool] = {}  # [rate]
    while (rate_rps := _next_rate(search, passed)) is not None:
        run = replace(search.run, rate_rps=rate_rps, most_violated=search.violations)
        result = lookup(run)
        if result is None:
            return run
        figures = result.figures
        passed[rate_rps] = figures is not None and violated_fraction(figures) <= search.violations
    return max((rate for rate, ok in passed.items() if ok), default=0.0)


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
