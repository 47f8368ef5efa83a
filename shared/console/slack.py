"""Counts requests by slack, the time until the deadline of their next token."""

import math
from bisect import bisect_right
from collections.abc import Iterable

# below 0 the next token is late; a finite last edge is not needed, since the last class is open
EDGES_S = (-3.0, -1.0, -0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def classes(slacks_s: Iterable[float]) -> list[int]:
    """The number of requests in each class: below the first edge, between two, above the last."""
    counts = [0] * (len(EDGES_S) + 1)
    for slack_s in slacks_s:
        if not math.isnan(slack_s):
            counts[bisect_right(EDGES_S, slack_s)] += 1
    return counts
