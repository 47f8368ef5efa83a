"""Prices work by a profile, for the policy slackline and `slackline advise`: the seconds that one
more token, chunk or decode adds to a batch with a long chunk in it (FULL). A profile is linear
there, so a whole queue is priced in a few operations on columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shared.columns import Ints
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Floats

FULL = BatchShape(1024, 1, decodes=1)
ONE, MANY = BatchShape(decodes=1), BatchShape(decodes=65)
CHUNK_TOKENS = 2048  # a long prompt is counted in chunks of so many tokens
FAR = 1_000_000  # an amount that makes the difference of two predictions exact
SAME = 0.002  # predictions that differ by less have the same prices


class Prices(NamedTuple):
    """Seconds. A chunk or a decode stands on the tokens before it, which are computed."""

    batch_s: float  # the fixed part of a batch
    token_s: float
    chunk_s: float
    square_s: float  # of a chunk's tokens squared
    cross_s: float  # of a chunk's tokens times those that it stands on
    has_s: float  # of the tokens that a chunk stands on
    decode_s: float
    context_s: float  # of a token that a decode stands on

    def prefill_s(self, tokens: Ints | Floats, cached: Ints | Floats) -> Floats:
        """[prompts] the prefill of `tokens` that stand on `cached` ones."""
        chunk = np.minimum(tokens, CHUNK_TOKENS)
        stand = cached + (tokens - chunk) / 2
        each = self.token_s + self.square_s * chunk + self.cross_s * stand
        chunks = np.ceil(tokens / CHUNK_TOKENS)
        seconds: Floats = tokens * each + chunks * (self.chunk_s + self.has_s * stand)
        return seconds

    def decoding_s(self, context: Floats) -> Floats:
        """[decodes] one token each, on so much context."""
        seconds: Floats = self.decode_s + self.context_s * context
        return seconds


def prices_of(profile: Profile) -> Prices:
    base_s = profile.batch_s(FULL)

    def each_s(amount: int, more: Callable[[BatchShape], BatchShape]) -> float:
        return max(0.0, profile.batch_s(more(FULL)) - base_s) / amount

    token_s = each_s(1024, lambda full: full._replace(prefill_tokens=2048))
    decode_s = each_s(1, lambda full: full._replace(decodes=2))
    # a corrected profile may have decodes for next to nothing beside a prompt: then among decodes
    among_s = (profile.batch_s(MANY) - profile.batch_s(ONE)) / 64
    return Prices(
        batch_s=max(0.0, base_s - 1024 * token_s),
        token_s=token_s,
        chunk_s=each_s(1, lambda full: full._replace(prefills=2)),
        square_s=each_s(FAR, lambda full: full._replace(prefill_sq=full.prefill_sq + FAR)),
        cross_s=each_s(FAR, lambda full: full._replace(prefill_cross=full.prefill_cross + FAR)),
        has_s=each_s(FAR, lambda full: full._replace(prefill_has=full.prefill_has + FAR)),
        decode_s=decode_s if decode_s >= among_s / 2 else among_s,
        context_s=each_s(FAR, lambda full: full._replace(decode_context=FAR)),
    )


class PriceList:
    """The prices of one replica. They are made anew once its profile predicts something else."""

    def __init__(self) -> None:
        self._profile: Profile | None = None
        self._seconds, self._prices = (0.0, 0.0), Prices(*[0.0] * 8)

    def of(self, profile: Profile) -> Prices:
        if profile is not self._profile:  # the same object predicts the same
            self._profile = profile
            seconds = profile.batch_s(FULL), profile.batch_s(MANY)
            if any(abs(b - a) > SAME * a for a, b in zip(self._seconds, seconds, strict=True)):
                self._seconds, self._prices = seconds, prices_of(profile)
        return self._prices
