"""The mean of a figure over several seeds, with its 95 % interval."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from msgspec import Struct

from loadgen.load.report import percent

# Student's t at 97.5 %, by degrees of freedom from 1
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


class Interval(Struct, frozen=True):
    """The true mean lies within `half_95` of this one in 19 of 20 such samples; 0: one seed."""

    mean: float
    half_95: float

    @property
    def in_percent(self) -> str:
        return (
            percent(self.mean)
            if not self.half_95
            else (f"{100 * self.mean:.1f} \u00b1 {100 * self.half_95:.1f} %")
        )


def interval(values: Sequence[float]) -> Interval:
    """`values`: one for each seed."""
    free = len(values) - 1
    if not free:
        return Interval(values[0], 0.0)
    # beyond the table within 1 % of t
    t = T_95[free - 1] if free <= len(T_95) else 1.96 + 2.5 / free
    return Interval(fmean(values), t * stdev(values) / math.sqrt(len(values)))
