"""A section of a page: one table or figure of a paper, with our figures beside the published ones.

A page has chapters, one for each paper; a chapter has sections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from loadgen.bound.limit import Bound
from loadgen.lab.papers.experiment import Run, RunResult
from loadgen.lab.papers.job import Capacity, Job, Lookup, Search, advance
from loadgen.trials.figures import Figures, Group

CLOSE = 0.15  # relative difference within which a figure counts as reproduced
# A percentage also counts within so many points: a ratio of a few requests in a thousand means
# nothing.
CLOSE_POINTS = 0.5
MISSING = "not run"


def nothing(_: Run) -> RunResult | None:
    """A lookup that finds no result."""
    return None


class Results:
    """The results of runs, as a section reads them.

    It records every job that the section requests. Where nothing is found, the record says what is
    to be run.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self.requested: list[Job] = []
        self.used: list[RunResult] = []

    def result(self, run: Run) -> RunResult | None:
        """The result of a run; None: not run yet."""
        self.requested.append(run)
        result = self._lookup(run)
        if result is not None:
            self.used.append(result)
        return result

    def figures(self, run: Run) -> Figures | None:
        """The figures of a run; None: not run yet."""
        result = self.result(run)
        return None if result is None else result.figures

    def bound(self, run: Run) -> Bound | None:
        """The bound of a run whose policy is BOUND; None: not computed yet."""
        result = self.result(run)
        return None if result is None else result.bound

    def capacity(self, search: Search) -> Capacity | None:
        """The capacity that a search found; None: not found yet."""
        self.requested.append(search)
        found = advance(search, self._lookup)
        if isinstance(found, Run):
            return None
        if found.result is not None:
            self.used.append(found.result)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table or figure. `render(results, duration_s)` returns the Markdown of its tables."""

    name: str  # as --only takes it
    title: str
    paper: str  # what the paper did and claims
    hours: float  # of arrivals in each run
    render: Callable[[Results, float], str]
    discussion: str  # what differs from the paper, why, and what was tried

    def jobs(self, duration_s: float, lookup: Lookup = nothing) -> Sequence[Job]:
        """The jobs that the section requests.

        Jobs that depend on runs which `lookup` does not find are added once it does.
        """
        results = Results(lookup)
        self.render(results, duration_s)
        return results.requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One file of docs/."""

    file: str
    introduction: str
    chapters: Sequence["Chapter"]

    @property
    def sections(self) -> Sequence[Section]:
        return [section for chapter in self.chapters for section in chapter.sections]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """The sections of one paper, with the setup that they share."""

    name: str  # --only takes it for all its sections
    title: str
    setup: str  # profile, workloads, baselines, and what stands in for what we do not have
    sections: Sequence[Section]


class Cells(NamedTuple):
    """The cells of one comparison."""

    published: str
    ours: str
    ratio: str
    verdict: str


def compare(published: float, ours: float | None, *, percent: bool = False) -> Cells:
    """Our figure beside the published one.

    It is reproduced within 15 %; a percentage also counts within half a point.
    """
    shown = f"{published:g} %" if percent else f"{published:g}"
    if ours is None:
        return Cells(shown, MISSING, "", "")
    near = abs(ours - published) <= CLOSE * abs(published) + 1e-9 or (
        percent and abs(ours - published) <= CLOSE_POINTS
    )
    ratio = f"{ours / published:.2f}" if published else "-"
    return Cells(shown, figure(ours, percent=percent), ratio, "within 15 %" if near else "no")


def figure(value: float | None, *, percent: bool = False) -> str:
    """A value with three significant digits."""
    if value is None:
        return MISSING
    return f"{value:.3g} %" if percent else f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def latency_s(
    tier: str, group: Group | None, percentile: Literal["p50", "p95", "p99"]
) -> float | None:
    """The latency that QoServe reports of a tier: the TTFT of Q1, the TTLT of the others."""
    if group is None:
        return None
    value: float | None = getattr(group.ttft_s if tier == "Q1" else group.ttlt_s, percentile)
    return value


def violated_percent(figures: Figures | Group | None) -> float | None:
    return None if figures is None else 100 * figures.violated_fraction
