"""The mean yield of chains of drafts, as a formula, for estimates without a draft model.

The draft gives its first choice the probability q, from Beta(a, 1) with mean a / (a + 1), and a
draft is accepted with the product of these along its chain ([adaserve] Eq. 7). So with the drafts
of at least probability p verified, draft i of a chain is verified with the probability that a
Poisson number of mean a ln(1/p) reaches i, and accepted with (a / (a + 1))^i times that of mean
(a + 1) ln(1/p).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

ACCEPTANCE = 0.7  # of the first draft
DEEPEST = 8
LEAST = (0.7, 0.5, 0.35, 0.25, 0.17, 0.1, 0.05)  # probability of a draft to be verified


class Yield(NamedTuple):
    """The yield for one request in one iteration, on average."""

    depth: int
    verified: float
    accepted: float


@cache
def yields() -> Sequence[Yield]:
    a, found = ACCEPTANCE / (1.0 - ACCEPTANCE), []
    for least in LEAST:
        log, verified, accepted = math.log(1.0 / least), 0.0, 0.0
        for depth in range(1, DEEPEST + 1):
            reached = _reaches(depth, a * log)
            verified += reached
            accepted += ACCEPTANCE**depth * _reaches(depth, (a + 1.0) * log)
            if depth > 1 and reached < 0.02:
                break
            found.append(Yield(depth, verified, accepted))
    return tuple(found)


@cache
def _by_verified() -> tuple[list[float], list[float]]:
    each = sorted((known.verified, known.accepted / known.verified) for known in yields())
    return [verified for verified, _ in each], [share for _, share in each]


def accepted_share(verified: float) -> float:
    """The share of drafts that is accepted if `verified` drafts are verified for a request."""
    known, shares = _by_verified()
    at = min(bisect_left(known, verified), len(known) - 1)
    nearer = at > 0 and verified - known[at - 1] < known[at] - verified
    return shares[at - nearer]


def _reaches(count: int, mean: float) -> float:
    """The probability that a Poisson number is at least `count`."""
    term = below = math.exp(-mean)
    for i in range(1, count):
        term *= mean / i
        below += term
    return 1.0 - below
