"""The lengths of a request, and the laws that they are drawn from."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import NamedTuple, Protocol

from shared.prefix import Piece

NORMAL = NormalDist()
REDRAWS = 1000  # of a pair that does not fit a context; the built-in workloads need two or three


class Lengths(NamedTuple):
    """A request's lengths. `then`: its session's later rounds, each `pause_s` after the last."""

    prompt_tokens: int
    output_tokens: int
    application: str
    thinking_tokens: int = 0  # of the output
    pause_s: float = 0.0
    then: "tuple[Lengths, ...]" = ()
    tier: str = ""  # as recorded; empty: to be drawn
    model: str = ""  # as recorded
    # as in PlannedRequest (mix.py)
    pieces: tuple[Piece, ...] = ()
    answer: int | None = None


class Drawn(Protocol):
    """A kind of request, or of session, that is drawn for a context."""

    def draw(self, rng: Random, context_tokens: int) -> Lengths: ...


class Law(Protocol):
    """A distribution of token counts, by its inverse."""

    def at(self, u: float) -> int:
        """The quantile of `u` in [0, 1): a count of at least 1."""


@dataclass(frozen=True, slots=True)
class TruncatedLognormal:
    """shift + exp(mu + sigma Z) between `minimum` and `maximum`."""

    mu: float
    sigma: float
    maximum: int
    minimum: int = 1  # above `shift`
    shift: float = 0.0

    def at(self, u: float) -> int:
        low, high = (
            NORMAL.cdf((math.log(bound - self.shift) - self.mu) / self.sigma)
            for bound in (self.minimum, self.maximum)
        )
        z = NORMAL.inv_cdf(_inside(low + u * (high - low)))
        return max(
            self.minimum, min(self.maximum, round(self.shift + math.exp(self.mu + self.sigma * z)))
        )


@dataclass(frozen=True, slots=True)
class TruncatedWeibull:
    """scale (-ln U)^(1/shape) between 1 and `maximum`."""

    shape: float
    scale: float
    maximum: int

    def at(self, u: float) -> int:
        low, high = (
            -math.expm1(-((bound / self.scale) ** self.shape)) for bound in (1, self.maximum)
        )
        within = _inside(low + u * (high - low))
        tokens: float = self.scale * (-math.log1p(-within)) ** (1 / self.shape)
        return max(1, min(self.maximum, round(tokens)))


def _inside(p: float) -> float:
    """The nearest probability at which an inverse distribution is finite."""
    return min(max(p, 1e-12), 1 - 1e-12)


@dataclass(frozen=True, slots=True)
class Knots:
    """Linear between the quantiles `tokens` at the probabilities `p`, which rise from 0 to 1."""

    p: Sequence[float]
    tokens: Sequence[float]

    def at(self, u: float) -> int:
        i = min(bisect_right(self.p, u), len(self.p) - 1)
        share = (u - self.p[i - 1]) / (self.p[i] - self.p[i - 1])
        return max(1, round(self.tokens[i - 1] + share * (self.tokens[i] - self.tokens[i - 1])))


def scaled_beta(a: float, b: float, low: float, high: float, pieces: int = 512) -> Knots:
    """low + (high - low) Beta(a, b), by its quantiles at `pieces` + 1 places.

    With x = sin^2(angle) the density is sin^(2a-1) cos^(2b-1), bounded for a and b of a half or
    more, so equal steps of the angle do.
    """
    step = math.pi / 2 / pieces
    middles = [(n + 0.5) * step for n in range(pieces)]
    mass = list(
        accumulate(
            (math.sin(x) ** (2 * a - 1) * math.cos(x) ** (2 * b - 1) for x in middles), initial=0.0
        )
    )
    tokens = [low + (high - low) * math.sin(n * step) ** 2 for n in range(pieces + 1)]
    return Knots([one / mass[-1] for one in mass], tokens)


@dataclass(frozen=True, slots=True)
class Shorter:
    """A law whose counts are divided by `times`."""

    law: Law
    times: int

    def at(self, u: float) -> int:
        return max(1, round(self.law.at(u) / self.times))


def coupled(u: float, v: float, rank_correlation: float) -> float:
    """A uniform value like `v` with this rank correlation to `u`; both are uniform on [0, 1)."""
    # the correlation of the two normal values whose ranks have that correlation
    r = 2 * math.sin(math.pi / 6 * rank_correlation)
    z = r * NORMAL.inv_cdf(_inside(u)) + math.sqrt(1 - r * r) * NORMAL.inv_cdf(_inside(v))
    return NORMAL.cdf(z)
