"""Counters, gauges and histograms as plain numbers: an update is an addition, the text is made when
a scraper asks (shared/telemetry/exposition.py). Only the event loop updates them: no locks.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

OTHER = "other"  # stands for further values once a capped label has as many as its cap


class Exemplar(NamedTuple):
    """One observation of a bucket, and the trace that tells its story."""

    trace_id: str
    value: float


class Sample(NamedTuple):
    """One line of an exposition: the ending of the family's name, one more label, the number."""

    suffix: str
    label: str
    number: float
    exemplar: Exemplar | None = None


class Counter:
    """A number that only grows."""

    kind = "counter"
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, n: float = 1) -> None:
        self.value += n

    def samples(self) -> list[Sample]:
        return [Sample("", "", self.value)]


class Gauge(Counter):
    """A number that rises and falls."""

    kind = "gauge"
    __slots__ = ()

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    """Counts per bucket (`bounds`: inclusive upper bounds, rising), with each newest exemplar."""

    kind = "histogram"
    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # by bucket

    def observe(self, value: float, n: int = 1, trace_id: str = "") -> None:
        """Count `n` observations of the same value. `trace_id`: of a kept trace."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += n
        self.total += value * n
        if trace_id:
            self.exemplars[bucket] = Exemplar(trace_id, value)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def samples(self) -> list[Sample]:
        rows, below = list[Sample](), 0
        for bucket, bound in enumerate((*self.bounds, float("inf"))):
            below += self.counts[bucket]
            label = f'le="{number(bound)}"'
            rows.append(Sample("_bucket", label, float(below), self.exemplars.get(bucket)))
        return [*rows, Sample("_sum", "", self.total), Sample("_count", "", float(below))]


M = TypeVar("M", Counter, Gauge, Histogram)


class Family(Generic[M]):
    """A metric with labels. `labels(...)` gives a child; keep it where updates are frequent."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        caps: Mapping[str, int],
        make: Callable[[], M],
    ) -> None:
        self.name, self.text, self.label_names = name, text, tuple(labels)
        self._caps = [caps.get(label) for label in self.label_names]
        self._seen: list[set[str]] = [set() for _ in self.label_names]
        self._make: Callable[[], M] = make
        self._children: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        """The child of these values, in the names' order. Raises ValueError for a wrong number."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"{self.name} has labels {self.label_names}, not {values}")
            values = tuple(self._capped(i, value) for i, value in enumerate(values))
            child = self._children.setdefault(values, self._make())
        return child

    def _capped(self, i: int, value: str) -> str:
        cap, seen = self._caps[i], self._seen[i]
        if cap is None or value in seen:
            return value
        if len(seen) >= cap:
            return OTHER
        seen.add(value)
        return value

    @property
    def kind(self) -> str:
        return self._make().kind

    @property
    def children(self) -> Mapping[tuple[str, ...], M]:
        """Each child by its label values."""
        return self._children

    def renamed(self, name: str) -> "Family[M]":
        """The same numbers under another name."""
        copy = Family(name, self.text, self.label_names, {}, self._make)
        copy._children = self._children
        return copy


AnyFamily = Family[Counter] | Family[Gauge] | Family[Histogram]


class Registry:
    """The metrics of a process. `caps`: the most values of a label that clients choose (tenant)."""

    def __init__(self) -> None:
        self._families: dict[str, AnyFamily] = {}
        self._refreshes: list[Callable[[], None]] = []

    def counter(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        caps: Mapping[str, int] | None = None,
    ) -> Family[Counter]:
        return self._added(Family(name, text, labels, caps or {}, Counter))

    def gauge(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        caps: Mapping[str, int] | None = None,
    ) -> Family[Gauge]:
        return self._added(Family(name, text, labels, caps or {}, Gauge))

    def histogram(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        caps: Mapping[str, int] | None = None,
    ) -> Family[Histogram]:
        return self._added(Family(name, text, labels, caps or {}, lambda: Histogram(bounds)))

    def _added(self, family: Family[M]) -> Family[M]:
        if family.name in self._families:
            raise ValueError(f"metric {family.name} is registered twice")
        self._families[family.name] = family
        return family

    def alias(self, name: str, family: Family[M]) -> None:
        """Show a family under a second name, for boards that know it by that name."""
        self._added(family.renamed(name))

    def before_scrape(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` each time before the numbers are read, for numbers that cost to keep."""
        self._refreshes.append(refresh)

    def families(self) -> list[AnyFamily]:
        """Every family with its numbers as they are now."""
        for refresh in self._refreshes:
            refresh()
        return list(self._families.values())


def number(value: float) -> str:
    """A number as both expositions write it."""
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
