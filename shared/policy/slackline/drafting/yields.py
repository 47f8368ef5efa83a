"""The yield of drafts: how many are verified, and how many of those are accepted, if each request
drafts a chain and the likeliest drafts of all are verified.

The law is that of shared/policy/acceptance.py: the draft gives its first choice the probability q,
from Beta(a, 1) with mean a / (a + 1), and a draft is accepted with the product of these along its
chain. The logarithm of that product is a sum of exponentials. So with the drafts of at least
probability p verified, draft i of a chain is verified with the probability that a Poisson number of
mean a ln(1/p) reaches i, and verified and accepted with (a / (a + 1))^i times that of mean
(a + 1) ln(1/p).
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

DEEPEST = 8
# The least probability of a draft to be verified.
LEAST = (0.7, 0.5, 0.35, 0.25, 0.17, 0.1, 0.05)


class Yield(NamedTuple):
    """The yield of one request in one iteration, in the mean."""

    depth: int
    verified: float
    accepted: float


@cache
def yields(acceptance: float) -> Sequence[Yield]:
    """`acceptance`: the mean probability that the first draft is accepted; below 1."""
    a = acceptance / (1.0 - acceptance)
    found = []
    for least in LEAST:
        log = math.log(1.0 / least)
        verified = accepted = 0.0
        for depth in range(1, DEEPEST + 1):
            reached = _reaches(depth, a * log)
            verified += reached
            accepted += acceptance**depth * _reaches(depth, (a + 1.0) * log)
            if depth > 1 and reached < 0.02:
                break
            found.append(Yield(depth, verified, accepted))
    return tuple(found)


def _reaches(count: int, mean: float) -> float:
    """The probability that a Poisson number is at least `count`."""
    term = below = math.exp(-mean)
    for i in range(1, count):
        term *= mean / i
        below += term
    return 1.0 - below
