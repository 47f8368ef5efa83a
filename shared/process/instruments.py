"""Counters, gauges and histograms as plain numbers: an update is an addition, and the text is made
when a scraper asks for it.

A process has one Registry. It is updated on the event loop only, so nothing is locked.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

OTHER = "other"  # stands for further values once a capped label has had its number


class Counter:
    """A number that only grows."""

    kind = "counter"
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, n: float = 1) -> None:
        self.value += n

    def samples(self) -> list[tuple[str, str, float]]:
        return [("", "", self.value)]


class Gauge:
    """A number that rises and falls."""

    kind = "gauge"
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        self.value = value

    def samples(self) -> list[tuple[str, str, float]]:
        return [("", "", self.value)]


class Histogram:
    """Counts per bucket; `bounds` are inclusive upper bounds, ascending, in the metric's unit."""

    kind = "histogram"
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """Count `n` observations of the same value."""
        self.counts[bisect_left(self.bounds, value)] += n
        self.total += value * n

    @property
    def count(self) -> int:
        return sum(self.counts)

    def samples(self) -> list[tuple[str, str, float]]:
        rows, below = [], 0
        for bound, n in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += n
            rows.append(("_bucket", f'le="{_number(bound)}"', float(below)))
        return [*rows, ("_sum", "", self.total), ("_count", "", float(below))]


M = TypeVar("M", Counter, Gauge, Histogram)


class Family(Generic[M]):
    """One metric with its labels. `labels(...)` returns a child; keep it where updates are
    frequent.
    """

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
        """The child with these label values, in the order of the label names. Raises ValueError for
        a wrong number of values.
        """
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

    def render(self) -> list[str]:
        kind = self._make().kind
        lines = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} {kind}"]
        for values, child in sorted(self._children.items()):
            own: list[str] = [
                f'{label}="{_escaped(value)}"'
                for label, value in zip(self.label_names, values, strict=True)
            ]
            for suffix, extra, number in child.samples():
                inside = ",".join([*own, extra] if extra else own)
                labels = f"{{{inside}}}" if inside else ""
                lines.append(f"{self.name}{suffix}{labels} {_number(number)}")
        return lines


class Registry:
    """The metrics of one process. `caps` limits the number of values of labels that clients choose
    (tenant, model).
    """

    def __init__(self) -> None:
        self._families: dict[str, Family[Counter] | Family[Gauge] | Family[Histogram]] = {}

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

    def render_prometheus(self) -> str:
        """The Prometheus text format, version 0.0.4."""
        return "".join(
            f"{line}\n" for family in self._families.values() for line in family.render()
        )


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
