"""Makes a lower limit of a profile, for the bound: ranges of the batch's tokens (strata), in each
of which an iteration takes at least a linear function of its batch.
"""

import math
from typing import NamedTuple

from shared.perf.additive import AdditiveProfile
from shared.perf.iteration_time import Profile
from shared.perf.stratified import StratifiedProfile


class Stratum(NamedTuple):
    """Iterations of `above` < tokens <= `up_to` take at least these terms (docs/bound.md, 3)."""

    above: int
    up_to: float
    base_s: float  # per iteration
    chunk_s: float  # per prefill chunk
    prefill_token_s: float
    prefill_sq_s: float  # per new token squared
    prefill_cross_s: float  # per new token and cached token
    prefill_context_s: float  # per chunk and cached token
    decode_s: float
    decode_context_s: float
    # the base at 1, 2, ... tokens, where there is such a curve; it never falls
    curve_s: tuple[float, ...] = ()
    beyond_s: float = 0.0  # per token past its end


def strata(profile: Profile) -> tuple[Stratum, ...]:
    """The strata in rising order, from 0 tokens to any number. Only a base may be negative."""
    match profile:
        case StratifiedProfile():
            return tuple(
                Stratum(
                    p.above,
                    p.up_to,
                    p.base_s,
                    0.0,
                    p.prefill_token_s,
                    0.0,
                    0.0,
                    p.prefill_context_s,
                    p.decode_token_s,
                    p.decode_context_s,
                )
                for p in profile.pieces
            )
        case AdditiveProfile():
            # Any batch pays for its prefills or for its decodes.
            once_s = min(profile.prefills_s, profile.decodes_s)
            return (
                Stratum(
                    0,
                    math.inf,
                    profile.curve_s[1] + once_s,
                    profile.prefill_s,
                    profile.prefill_token_s,
                    profile.prefill_sq_s,
                    profile.prefill_cross_s,
                    0.0,
                    profile.decode_s,
                    profile.decode_context_s,
                    tuple(at_s + once_s for at_s in profile.curve_s[1:]),
                    profile.beyond_s,
                ),
            )
    raise AssertionError(f"{profile.name}: a form without strata")
