"""Says how far a command is, and how long the rest will take: for `simulate`, `compare`, `advise`,
`search` and `capacity`.
"""

import math
import time
from collections.abc import Sequence

from loadgen.trials.goodput import Probe


class Remaining:
    """Begins when the runs do."""

    def __init__(self, runs: int) -> None:
        self._runs, self._done, self._began_s = runs, 0, time.perf_counter()

    def one_done(self) -> str:
        """`[3/9, about 40 s left]`, if the others take as long as those that are done."""
        self._done += 1
        return f"[{self._done}/{self._runs}{left(self._done / self._runs, self._began_s)}]"


def left(part: float, began_s: float) -> str:
    """`, about 40 s left`, if this part of the work is done since `began_s` (perf_counter); empty
    before the first hundredth, and when all is done.
    """
    took_s = time.perf_counter() - began_s
    return _about(took_s * (1 - part) / part) if 0.01 <= part < 1 else ""


def search_left(
    probes: Sequence[Probe], violations: float, precision: float, began_s: float
) -> str:
    """`, 4 more rates, about 40 s left`, if each takes as long as those so far; empty until the
    capacity has a limit on both sides.
    """
    passed = [p.rate_rps for p in probes if p.violated_fraction <= violations]
    failed = [p.rate_rps for p in probes if p.violated_fraction > violations]
    if not passed or not failed or min(failed) <= max(passed) * (1 + precision):
        return ""
    # each rate halves the distance, which is counted in factors
    rates = math.ceil(math.log2(math.log(min(failed) / max(passed)) / math.log1p(precision)))
    each_s = (time.perf_counter() - began_s) / len(probes)
    return f", {rates} more rate{'s' if rates > 1 else ''}{_about(rates * each_s)}"


def _about(left_s: float) -> str:
    time_left = f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min"
    return f", about {time_left} left"
