"""One table or figure of a paper: what it asks of the simulator, and how its figures stand beside
the published ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from loadgen.bound.limit import Bound
from loadgen.lab.figures import Figures, Group
from loadgen.results.cache import Cache
from loadgen.results.experiment import Made, Run
from loadgen.results.job import Capacity, Job, Search, capacity

CLOSE = 0.15  # counts as reproduced
CLOSE_POINTS = 0.5  # of percentages too: of a few in a thousand requests no ratio is worth anything
MISSING = "not run"


class Lab:
    """Where a section finds its figures. It notes what was asked for, so that asking without a
    cache says what is to be run.
    """

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache
        self.asked: list[Job] = []
        self.used: list[Made] = []

    def figures(self, run: Run) -> Figures | None:
        """None: not run yet."""
        self.asked.append(run)
        made = self._known(run)
        if made is None:
            return None
        self.used.append(made)
        return made.figures

    def bound(self, run: Run) -> Bound | None:
        """`run` has BOUND as its policy. None: not worked out yet."""
        self.asked.append(run)
        made = self._known(run)
        if made is None:
            return None
        self.used.append(made)
        return made.bound

    def capacity(self, search: Search) -> Capacity | None:
        """None: not found yet."""
        self.asked.append(search)
        found = capacity(search, self._known)
        if isinstance(found, Run):
            return None
        if found.made is not None:
            self.used.append(found.made)
        return found

    def _known(self, run: Run) -> Made | None:
        return None if self._cache is None else self._cache.get(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """`body(lab, duration_s)` is the Markdown of its tables; `notes`, what differs and what was
    tried.
    """

    name: str  # what --only takes
    title: str
    paper: str  # what the paper did and says
    hours: float  # of arrivals in each run
    body: Callable[[Lab, float], str]
    notes: str

    def jobs(self, duration_s: float, cache: Cache | None = None) -> Sequence[Job]:
        """What it asks for, as far as that can be said: what depends on runs that `cache` lacks
        comes when they are there.
        """
        lab = Lab(cache)
        self.body(lab, duration_s)
        return lab.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One file of docs/: parts, each with a head of its own, and sections in them."""

    file: str
    head: str
    parts: Sequence["Part"]

    @property
    def sections(self) -> Sequence[Section]:
        return [section for part in self.parts for section in part.sections]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What belongs to one paper."""

    name: str  # --only takes it for all its sections
    title: str
    head: str  # profile, workload and other stand-ins
    sections: Sequence[Section]


class Cells(NamedTuple):
    """One comparison: published, ours, ratio, verdict."""

    published: str
    ours: str
    ratio: str
    verdict: str


def compare(published: float, ours: float | None, *, percent: bool = False) -> Cells:
    """Within 15 % counts; a percentage also counts within half a point."""
    shown = f"{published:g} %" if percent else f"{published:g}"
    if ours is None:
        return Cells(shown, MISSING, "", "")
    near = abs(ours - published) <= CLOSE * abs(published) + 1e-9 or (
        percent and abs(ours - published) <= CLOSE_POINTS
    )
    ratio = f"{ours / published:.2f}" if published else "-"
    return Cells(shown, figure(ours, percent=percent), ratio, "within 15 %" if near else "no")


def figure(value: float | None, *, percent: bool = False) -> str:
    """Three digits."""
    if value is None:
        return MISSING
    return f"{value:.3g} %" if percent else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def latency_s(
    tier: str, of: Group | None, percentile: Literal["p50", "p95", "p99"]
) -> float | None:
    """What QoServe gives as the latency of its tiers: TTFT of Q1, TTLT of the others."""
    if of is None:
        return None
    value: float | None = getattr(of.ttft_s if tier == "Q1" else of.ttlt_s, percentile)
    return value


def violated_percent(of: Figures | Group | None) -> float | None:
    return None if of is None else 100 * of.violated_fraction


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (headers, ["---"] * len(headers), *rows)]
    return "\n".join(lines)
