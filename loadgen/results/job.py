"""What an experiment asks for: a run, or a search for the rate that a policy carries. Each is done by one process, run after run."""

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from loadgen.capacity import DIGITS, next_rate
from loadgen.results.run import Made, Run
from loadgen.workload import WORKLOADS

VIOLATIONS = 0.01  # QoServe section 4.1.2: at most 1 % of the requests
PRECISION = 0.03
STEP_DOWN = 0.85

Known = Callable[[Run], Made | None]


class Search(Struct, frozen=True, kw_only=True):
    """The highest rate at which no more than VIOLATIONS of the requests are violated, within PRECISION.

    `run.rate_rps` is tried first. Every rate has the same seed: the same requests, their gaps scaled.
    """

    run: Run

    def at(self, rate_rps: float) -> Run:
        return replace(self.run, rate_rps=rate_rps, most_violated=VIOLATIONS)


Job = Run | Search


def recorded(job: Job) -> bool:
    """It needs a trace, which is not part of the project."""
    run = job if isinstance(job, Run) else job.run
    return run.workload not in WORKLOADS


class Capacity(Struct, frozen=True, kw_only=True):
    """Requests per second; 0 where even the lowest rate fails, then without a run."""

    rate_rps: float
    made: Made | None


def next_run(job: Job, known: Known) -> Run | None:
    """The first run that is still to be made."""
    if isinstance(job, Run):
        return None if known(job) else job
    found = capacity(job, known)
    return found if isinstance(found, Run) else None


def capacity(search: Search, known: Known) -> Capacity | Run:
    """What the search found, or the run it waits for."""
    made: dict[float, Made] = {}
    passed: dict[float, bool] = {}
    while (rate_rps := _next_rate(search.run, passed)) is not None:
        run = search.at(rate_rps)
        one = known(run)
        if one is None:
            return run
        made[rate_rps] = one
        passed[rate_rps] = one.figures is not None
    best_rps = max((rate for rate, well in passed.items() if well), default=0.0)
    return Capacity(rate_rps=best_rps, made=made.get(best_rps))


def _next_rate(first: Run, passed: Mapping[float, bool]) -> float | None:
    """As in loadgen/capacity.py; but a first rate that fails is near, and half of it would be a long run for little: those that pass
    are not stopped early."""
    if passed == {first.rate_rps: False}:
        return float(f"{STEP_DOWN * first.rate_rps:.{DIGITS}g}")
    return next_rate(passed, PRECISION, first.rate_rps, 1 / first.duration_s)
