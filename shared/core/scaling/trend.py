"""The level and the trend of a load, from its work in each of the last seconds."""

import math
from typing import NamedTuple

import numpy as np

from shared.policy.seam import Floats

LATE_S = 30  # a jump is looked for in the last so many seconds
SURE = 2.0  # standard deviations of their mean that a jump must exceed


class Trend(NamedTuple):
    """Work in seconds a second: now and ahead; and its variance from one second to the next."""

    now: float
    ahead: float
    variance: float


def trend_of(work: Floats, ahead_s: float) -> Trend:
    """The least-squares line through `work`, a value for each second, read at its end and `ahead_s`
    later. Its slope is shrunk by the part of it that chance explains (James and Stein). Where the
    last LATE_S are surely above the line, they are the level now.
    """
    n = len(work)
    if n < LATE_S:  # as if nothing had come before
        level = float(work.sum()) / LATE_S
        return Trend(level, level, float(work.var()) if n else 0.0)
    at = np.arange(n) - (n - 1) / 2
    mean, spread = float(work.mean()), float(at @ at)
    slope = float(at @ work) / spread
    variance = float(np.square(work - mean - slope * at).sum()) / max(n - 2, 1)
    chance = variance / spread  # the variance of the slope
    slope *= max(0.0, 1.0 - chance / slope**2) if slope else 0.0
    now = max(mean + slope * (n - 1) / 2, 0.0)
    late = work[-LATE_S:]
    now = max(now, float(late.mean()) - SURE * math.sqrt(variance / len(late)))
    return Trend(now, max(now + slope * ahead_s, 0.0), variance)
