"""What an experiment asks for: a run, or a search for the rate that a policy carries. Each is done
by one process, run after run.
"""

import math
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from loadgen.lab.goodput import DIGITS, next_rate
from loadgen.load.workload import WORKLOADS
from loadgen.results.experiment import Made, Run, violated_fraction

VIOLATIONS = 0.01  # QoServe section 4.1.2: at most 1 % of the requests
PRECISION = 0.03
STEP_DOWN = 0.85

Known = Callable[[Run], Made | None]


class Search(Struct, frozen=True, kw_only=True):
    """The highest rate at which no more than `violations` of the requests are violated, within
    `precision` of it.

    `run.rate_rps` is tried first, then `step` times as much while that is carried. Every rate has
    the same seed: the same requests, their gaps scaled. With `rivals` it is the highest rate that
    any of them carries: they serve the same requests, and are tried while nobody before them
    carried a rate, except above one that they did not carry.
    """

    run: Run
    violations: float = VIOLATIONS
    precision: float = PRECISION
    rivals: tuple[Run, ...] = ()
    step: float = 2.0

    def at(self, run: Run, rate_rps: float) -> Run:
        return replace(run, rate_rps=rate_rps, most_violated=self.violations)


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
    carried: dict[float, Made | None] = {}
    field = [search.run, *search.rivals]
    too_much = [math.inf] * len(field)  # [field] the lowest rate that it did not carry
    order = list(range(len(field)))
    while (
        rate_rps := _next_rate(search, {rate: made is not None for rate, made in carried.items()})
    ) is not None:
        carried[rate_rps] = None
        for n in order:
            if rate_rps >= too_much[n]:
                continue
            run = search.at(field[n], rate_rps)
            made = known(run)
            if made is None:
                return run
            if made.figures is not None and violated_fraction(made.figures) <= search.violations:
                carried[rate_rps] = made
                order.remove(n)
                order.insert(0, n)  # who carried this rate may carry the next
                break
            too_much[n] = rate_rps
    best_rps = max((rate for rate, made in carried.items() if made is not None), default=0.0)
    return Capacity(rate_rps=best_rps, made=carried.get(best_rps))


def _next_rate(search: Search, passed: Mapping[float, bool]) -> float | None:
    """As in loadgen/lab/goodput.py; but a first rate that fails is near, and half of it would be a
    long run for little: those that pass are not stopped early.
    """
    first = search.run
    if passed == {first.rate_rps: False}:
        return float(f"{STEP_DOWN * first.rate_rps:.{DIGITS}g}")
    if passed and all(passed.values()):
        return search.step * max(passed)
    return next_rate(passed, search.precision, first.rate_rps, 1 / first.duration_s)
