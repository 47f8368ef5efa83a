"""The values of a table's cells, from the results of runs: one for each seed.

A value is a function of the results. It asks for all the runs that it needs, and is None while one
of them has not run.
"""

from collections.abc import Callable, Sequence
from math import prod
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.papers.run import Run, RunResult, violated_fraction
from loadgen.lab.papers.search import VIOLATIONS, Job, Lookup, Search, advance
from loadgen.trials.figures import Figures


class Found(NamedTuple):
    """A value, by seed. `label` says whose it is, where it is the best of several."""

    each: tuple[float, ...]
    label: str = ""

    @property
    def mean(self) -> float:
        return fmean(self.each)


class Results:
    """The results of runs, as values read them; it notes the runs asked for and the results given.

    `hours`: the hours of arrivals that each run has, whatever its row says.
    """

    def __init__(self, lookup: Lookup, hours: float | None = None) -> None:
        self._lookup, self._hours = lookup, hours
        self.requested: list[Job] = []
        self.used: list[RunResult] = []

    def _sized(self, run: Run) -> Run:
        return run if self._hours is None else replace(run, duration_s=3600 * self._hours)

    def _seen(self, run: Run) -> RunResult | None:
        result = self._lookup(run)
        if result is not None:
            self.used.append(result)
        return result

    def figures(self, run: Run) -> Figures | None:
        self.requested.append(self._sized(run))
        result = self._seen(self._sized(run))
        return None if result is None else result.figures

    def capacity(self, search: Search) -> float | None:
        """The capacity that the search found, in requests per second; None: it is not done."""
        sized = replace(search, run=self._sized(search.run))
        self.requested.append(sized)
        found = advance(sized, self._seen)
        return None if isinstance(found, Run) else found


Value = Callable[[Results], Found | None]
Read = Callable[[Figures], float]


def _found(values: Sequence[float | None]) -> Found | None:
    known = tuple(value for value in values if value is not None)
    return Found(known) if len(known) == len(values) else None


def _seeded(run: Run, seeds: Sequence[int]) -> list[Run]:
    return [replace(run, seed=seed) for seed in seeds] or [run]


def of(read: Read, run: Run, seeds: Sequence[int] = ()) -> Value:
    """The value that `read` makes of the run's figures, with each of the seeds."""

    def value(results: Results) -> Found | None:
        figures = [results.figures(one) for one in _seeded(run, seeds)]
        return _found([None if one is None else read(one) for one in figures])

    return value


def violated(figures: Figures) -> float:
    """The requests whose SLO was not met, in %; with sessions of rounds, the sessions."""
    return 100 * violated_fraction(figures)


def met(figures: Figures) -> float:
    return 100 - violated(figures)


def important_violated(figures: Figures) -> float:
    """The share of the most important requests, in %."""
    groups = figures.by_importance
    return 100 * groups[max(groups, key=float)].violated_fraction


def met_worth(run: Run, seeds: Sequence[int] = ()) -> Value:
    """Requests whose SLO was met, in %, where one counts as often as it is important."""

    def read(figures: Figures) -> float:
        tiers, groups = run.tiers.tiers, figures.by_tier
        found = [(tiers[name].importance, group) for name, group in groups.items()]
        if run.important:
            found = [(float(name), group) for name, group in figures.by_importance.items()]
        offered = sum(importance * group.offered for importance, group in found)
        return 100 * (1 - sum(worth * group.violated for worth, group in found) / offered)

    return of(read, run, seeds)


def capacity(
    run: Run, *, violations: float = VIOLATIONS, precision: float = 0.03, step: float = 2.0
) -> Value:
    """The highest rate with at most `violations`, within `precision`; the run's is tried first."""
    search = Search(run=run, violations=violations, precision=precision, step=step)

    def value(results: Results) -> Found | None:
        return _found([results.capacity(search)])

    return value


def together(runs: Sequence[Run]) -> Value:
    """The violated requests of several runs together, in %."""

    def value(results: Results) -> Found | None:
        figures = [results.figures(run) for run in runs]
        known = [one for one in figures if one is not None]
        if len(known) < len(figures):
            return None
        offered = sum(one.offered for one in known)
        return Found((100 * sum(one.violated for one in known) / offered,))

    return value


def combined(function: Callable[..., float], *values: Value) -> Value:
    """The function of the values, seed by seed."""

    def value(results: Results) -> Found | None:
        found = [one(results) for one in values]
        known = [one.each for one in found if one is not None]
        if len(known) < len(found):
            return None
        return Found(tuple(function(*of_seed) for of_seed in zip(*known, strict=True)))

    return value


def over(ours: Value, theirs: Value) -> Value:
    return combined(lambda a, b: a / b if b else float("inf"), ours, theirs)


def ahead(ours: Value, theirs: Value) -> Value:
    return combined(lambda a, b: a - b, ours, theirs)


def highest(*values: Value) -> Value:
    return combined(max, *values)


def lowest(*values: Value) -> Value:
    return combined(min, *values)


def geometric(*values: Value) -> Value:
    return combined(lambda *each: prod(each) ** (1 / len(each)), *values)


def extreme(choose: Callable[..., Found], candidates: Sequence[tuple[str, Value]]) -> Value:
    """The candidate whose mean `choose` (min or max) takes, the first of equals, with its label."""

    def value(results: Results) -> Found | None:
        found = [(label, candidate(results)) for label, candidate in candidates]
        known = [Found(one.each, label) for label, one in found if one is not None]
        return choose(known, key=lambda one: one.mean) if len(known) == len(found) else None

    return value
