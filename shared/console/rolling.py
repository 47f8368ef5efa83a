"""Counts and latencies of the last minutes, for the console; the oldest are forgotten in parts."""

import math
from collections import Counter, deque

from shared.console.picture import Quantiles

WINDOW_S, PART_S = 300.0, 5.0
PARTS = int(WINDOW_S / PART_S)
# bins of a latency: each 10 % wider than the one before, so a quantile is within 5 %
SHORTEST_S, RATIO = 1e-3, math.log(1.1)
BINS = 200  # 1 ms to 58 hours


class Part:
    """The counts of one part of the window."""

    __slots__ = ("counts", "latencies", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.counts: Counter[str] = Counter()
        self.latencies: Counter[tuple[str, int]] = Counter()


class Rolling:
    """Counts and latencies by name, over WINDOW_S."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._latencies: Counter[tuple[str, int]] = Counter()
        self._parts: deque[Part] = deque()

    def count(self, name: str, now_unix_s: float, times: int = 1) -> None:
        self._part(now_unix_s).counts[name] += times
        self.counts[name] += times

    def latency(self, name: str, value_s: float, now_unix_s: float, times: int = 1) -> None:
        place = (name, bin_of(value_s))
        self._part(now_unix_s).latencies[place] += times
        self._latencies[place] += times

    def forget(self, now_unix_s: float) -> None:
        """Drop the parts that have left the window."""
        oldest = int(now_unix_s / PART_S) - PARTS
        while self._parts and self._parts[0].number <= oldest:
            part = self._parts.popleft()
            self.counts -= part.counts
            self._latencies -= part.latencies

    def quantiles(self, name: str) -> Quantiles:
        found = sorted((place, n) for (named, place), n in self._latencies.items() if named == name)
        total = sum(n for _, n in found)
        return Quantiles(p50_s=_quantile(found, total, 0.5), p99_s=_quantile(found, total, 0.99))

    def history(self, name: str, of: str, now_unix_s: float, points: int) -> list[float | None]:
        """The share of `of` that was `name`, by points of the window; None without any `of`."""
        newest, each = int(now_unix_s / PART_S), PARTS // points
        sums = [[0, 0] for _ in range(points)]
        for part in self._parts:
            place = points - 1 - (newest - part.number) // each
            if 0 <= place < points:
                sums[place][0] += part.counts[name]
                sums[place][1] += part.counts[of]
        return [good / every if every else None for good, every in sums]

    def _part(self, now_unix_s: float) -> Part:
        number = int(now_unix_s / PART_S)
        if not self._parts or self._parts[-1].number < number:
            self.forget(now_unix_s)
            self._parts.append(Part(number))
        return self._parts[-1]


def bin_of(value_s: float) -> int:
    if not value_s > SHORTEST_S:
        return 0
    return min(int(math.log(min(value_s, 1e9) / SHORTEST_S) / RATIO) + 1, BINS - 1)


def _quantile(found: list[tuple[int, int]], total: int, q: float) -> float | None:
    """The middle of the bin in which the part `q` of all values is reached; None without values."""
    seen = 0
    for place, n in found:
        seen += n
        if seen >= q * total:
            return SHORTEST_S * math.exp((place - 0.5) * RATIO) if place else 0.0
    return None
