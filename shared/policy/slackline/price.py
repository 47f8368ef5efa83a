"""The price of work in seconds of a full batch, by the profile.

A batch costs a fixed part, and a part for each token, each chunk, its attention, and each decode.
The prices are what one more of these adds to a batch of FULL_TOKENS. Profiles are linear there, so
a whole queue is priced in a few operations on columns.

A corrected profile may say that one more decode costs next to nothing beside a full batch, since a
mixed batch is never predicted faster than its prefills alone. Then what it costs among decodes
counts.
"""

import math
from typing import NamedTuple, TypeVar

import numpy as np

from shared.columns import Ints
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Floats

FULL_TOKENS = 1024
# A long prompt is counted in chunks of so many tokens.
CHUNK_TOKENS = 512
FAR = 1_000_000  # an amount that makes a difference of two predictions exact enough

Number = TypeVar("Number", float, Floats)


class Prices(NamedTuple):
    """Seconds."""

    batch_s: float  # the fixed part
    token_s: float
    chunk_s: float
    square_s: float  # of a chunk's tokens squared
    cross_s: float  # of a chunk's tokens times those that it stands on
    has_s: float  # of the tokens that a chunk stands on
    decode_s: float
    context_s: float  # of a token that a decode stands on

    def prefill_s(self, tokens: Ints | Floats, cached: Ints | Floats) -> Floats:
        """[prompts] their prefill: `tokens` that stand on `cached` ones."""
        tokens = np.asarray(tokens, dtype=np.float64)
        chunk = np.minimum(tokens, CHUNK_TOKENS)
        return self._chunks_s(
            tokens, chunk, np.ceil(tokens / CHUNK_TOKENS), cached + (tokens - chunk) / 2
        )

    def prompt_s(self, tokens: int) -> float:
        """The prefill of one prompt."""
        chunk = min(tokens, CHUNK_TOKENS)
        return self._chunks_s(
            float(tokens), chunk, math.ceil(tokens / CHUNK_TOKENS), (tokens - chunk) / 2
        )

    def _chunks_s(self, tokens: Number, chunk: Number, chunks: Number, stand: Number) -> Number:
        """`stand`: tokens that each chunk stands on, in the mean."""
        return tokens * (self.token_s + self.square_s * chunk + self.cross_s * stand) + chunks * (
            self.chunk_s + self.has_s * stand
        )

    def decoding_s(self, context: Floats) -> Floats:
        """[decodes] one token each, on so much context."""
        seconds: Floats = self.decode_s + self.context_s * context
        return seconds


# A full batch, and the same with more of something.
FULL = BatchShape(FULL_TOKENS, 1, decodes=1)
MORE_TOKENS = FULL._replace(prefill_tokens=2 * FULL_TOKENS)
MORE_CHUNKS = FULL._replace(prefills=2)
MORE_SQUARES = FULL._replace(prefill_sq=FULL.prefill_sq + FAR)
MORE_CROSS = FULL._replace(prefill_cross=FULL.prefill_cross + FAR)
MORE_HAS = FULL._replace(prefill_has=FULL.prefill_has + FAR)
MORE_DECODES = FULL._replace(decodes=2)
ONE_DECODE, MANY_DECODES = BatchShape(decodes=1), BatchShape(decodes=65)
LEAST = 0.5  # of the price among decodes
MORE_CONTEXT = FULL._replace(decode_context=FULL.decode_context + FAR)


def prices_of(profile: Profile) -> Prices:
    base_s = profile.batch_s(FULL)

    def each_s(more: BatchShape, amount: int) -> float:
        return max(0.0, profile.batch_s(more) - base_s) / amount

    token_s = each_s(MORE_TOKENS, FULL_TOKENS)
    decode_s = each_s(MORE_DECODES, 1)
    among_s = (profile.batch_s(MANY_DECODES) - profile.batch_s(ONE_DECODE)) / 64
    if decode_s < LEAST * among_s:
        decode_s = among_s
    return Prices(
        batch_s=max(0.0, base_s - FULL_TOKENS * token_s),
        token_s=token_s,
        chunk_s=each_s(MORE_CHUNKS, 1),
        square_s=each_s(MORE_SQUARES, FAR),
        cross_s=each_s(MORE_CROSS, FAR),
        has_s=each_s(MORE_HAS, FAR),
        decode_s=decode_s,
        context_s=each_s(MORE_CONTEXT, FAR),
    )


class PriceList:
    """The prices of the profile that was last asked for: it stays the same for several decisions,
    as long as its predictions do.
    """

    def __init__(self) -> None:
        self._known: tuple[Profile, Prices] | None = None

    def of(self, profile: Profile) -> Prices:
        if self._known is None or self._known[0] is not profile:
            self._known = profile, prices_of(profile)
        return self._known[1]
