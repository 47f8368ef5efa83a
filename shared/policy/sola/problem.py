"""SOLA's choice of what an iteration minimises, TTFT or TPOT, with the other as a constraint
(section 4.4.1, Table 2), and the workload that each of the two problems allows (section 4.4.3).

The constraint of the problem chosen is held for the share of requests that have it within their SLO
now. That is all of them, unless both are broken (Table 2, last row) or the window still has the
other problem; the objective needs no level.
"""

import math
from collections import deque
from enum import Enum

import numpy as np

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Floats


class Problem(Enum):
    """The latency that is minimised; the other one is the constraint."""

    TTFT = "minimise the largest TTFT, subject to TPOT"
    TPOT = "minimise the largest TPOT, subject to TTFT"


def attained(ratios: Floats) -> float:
    """The share of requests within their SLO; 1 where there are none."""
    return float(np.count_nonzero(ratios <= 1)) / len(ratios) if len(ratios) else 1.0


def enough(share: float, requests: int) -> int:
    """The smallest number of `requests` that is at least `share` of them."""
    return math.ceil(share * requests - 1e-9)


def level(ratios: Floats, share: float) -> float:
    """The a-% level maximum: the largest of the smallest a % of the ratios (the maximum, for 1). It
    is 0 where there are none.
    """
    count = enough(share, len(ratios))
    return float(np.partition(ratios, count - 1)[count - 1]) if count else 0.0


def fulfilment(ttft: Floats, tpot: Floats) -> tuple[float, float]:
    """p_TTFT and p_TPOT. Where both are above 1, both are taken over the share of requests that the
    better attained of the two latencies has within its SLO.

    That share is the first level, coming down from 100 %, at which one of the two satisfies (Figure
    5). If no request satisfies either, there is no such level, and the plain maxima stand.
    """
    p_ttft, p_tpot = level(ttft, 1.0), level(tpot, 1.0)
    if p_ttft > 1 and p_tpot > 1:
        share = max(attained(ttft), attained(tpot))
        if share > 0:
            p_ttft, p_tpot = level(ttft, share), level(tpot, share)
    return p_ttft, p_tpot


class Window:
    """p_TTFT and p_TPOT of the last iterations. Their means are compared, so that sudden changes
    weigh little (section 4.4.2).
    """

    def __init__(self, iterations: int) -> None:
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=iterations)

    def clear(self) -> None:
        self._seen.clear()

    def problem(self, at_unix_s: float, p_ttft: float, p_tpot: float) -> Problem:
        """The problem of the iteration that begins at `at_unix_s`. A second call for the same
        iteration replaces the values of the first.
        """
        if self._seen and self._seen[-1][0] >= at_unix_s:
            self._seen.pop()
        self._seen.append((at_unix_s, p_ttft, p_tpot))
        more = sum(ttft - tpot for _, ttft, tpot in self._seen)
        return Problem.TTFT if more >= 0 else Problem.TPOT


def pause_s(slack_s: Floats, share: float) -> float:
    """The longest C_p(Q_run) that satisfies Eq. 1 for this share of the decodes; inf where there
    are none.
    """
    count = enough(share, len(slack_s))
    if not count:
        return math.inf
    return max(0.0, float(np.partition(slack_s, len(slack_s) - count)[len(slack_s) - count]))


def too_long(iteration_s: float, spare_s: Floats, share: float) -> bool:
    """Tells whether Eq. 2 is broken: after an iteration of `iteration_s`, fewer than `share` of the
    waiting requests can keep their TTFT.

    `spare_s`: T_TTFT - t_TTFT - C_p(r) of each.
    """
    return int(np.count_nonzero(spare_s < iteration_s)) > len(spare_s) - enough(share, len(spare_s))


def fitting(profile: Profile, shape: BatchShape, cached: int, budget_s: float, most: int) -> int:
    """The largest chunk, up to `most` tokens, with which a prefill iteration takes no longer than
    `budget_s`.
    """
    if most <= 0 or budget_s == math.inf:
        return max(most, 0)
    if profile.batch_s(shape.with_chunk(most, cached)) <= budget_s:
        return most
    return profile.prefill_budget(shape, cached, budget_s, most)
