"""A(r): the tokens that a request must have accepted in this iteration to keep its pace ([adaserve]
section 3).

A worker computes it when the iteration begins, from the tokens that the request then has. A plan
says only how long the iteration is to last.

The paper's only SLO is the mean time per output token. Other SLOs are read as follows:
- *A TTLT*: the most tokens that may be left are spread evenly over the time left. The larger of the
  two needs counts.
- *Stages with paces of their own*: the pace of the present stage is held over the whole output.
- *Neither, or best-effort, or past its TTLT*: nothing is needed; throughput decides.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.columns import Ints
from shared.policy.seam import Bools, Floats

Needs = NDArray[np.float32]

ROUNDING_S = 1e-6  # more than the errors of sums of instants


class Pace(NamedTuple):
    """The pace that one request must keep, and where it is."""

    tbt_s: float  # of the present stage; inf without one
    last_due_unix_s: float  # arrived + TTLT; inf without one
    first_token_unix_s: float  # when token 1 came; inf before
    generated_tokens: int
    max_tokens: int
    best_effort: bool


class Paces(NamedTuple):
    """A column for each field of `Pace`, along several requests."""

    tbt_s: Floats
    last_due_unix_s: Floats
    first_token_unix_s: Floats
    generated_tokens: Ints
    max_tokens: Ints
    best_effort: Bools


def paces_of(requests: Iterable[Pace]) -> Paces:
    return Paces(*(np.array(column) for column in zip(*requests, strict=True)))


def needed_tokens(paces: Paces, start_unix_s: float, lasts_s: float) -> Needs:
    """A(r) = (l + t_spec) / TPOT - o of each request, the root included. The value is at least 0;
    up to 1, a plain decode is enough.

    l is the time in seconds since the first token. o is the number of tokens since then. t_spec is
    `lasts_s`; without it nothing is needed. Source: [adaserve] Eq. 2 and 3.
    """
    tbt_s, last_due_unix_s, first_token_unix_s, generated, max_tokens, best_effort = paces
    if lasts_s <= 0.0:
        return np.zeros(len(tbt_s), dtype=np.float32)
    spent_s = np.maximum(start_unix_s - first_token_unix_s, 0.0)
    by_pace = np.where(np.isfinite(tbt_s), (spent_s + lasts_s) / tbt_s - (generated - 1), -math.inf)
    left_s = last_due_unix_s - start_unix_s
    by_end = np.where(
        left_s > 0, (max_tokens - generated) * lasts_s / np.maximum(left_s, lasts_s), 0.0
    )
    need = np.where(best_effort, 0.0, np.maximum(by_pace, by_end))
    # as fine as the probabilities that it is compared with
    return need.astype(np.float32)


def calm_until_unix_s(paces: Paces, lasts_s: float) -> float:
    """The instant until which no request with a token needs more than a plain decode."""
    if lasts_s <= 0.0:
        return math.inf
    by_pace_s = paces.first_token_unix_s + paces.generated_tokens * paces.tbt_s
    by_end_s = paces.last_due_unix_s - (paces.max_tokens - paces.generated_tokens) * lasts_s
    until_s = np.minimum(by_pace_s - lasts_s, by_end_s)[~paces.best_effort]
    return float(until_s.min(initial=math.inf)) - ROUNDING_S
