"""Computes for the bound how much a request is charged for its work, in seconds of a replica, such
that no iteration collects more seconds than it takes (docs/bound.md, 3).

An iteration collects `iteration_s` from the requests that get a token in it, and every chunk and
every decode pays for itself besides.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from loadgen.bound.strata import Stratum

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Charges:
    """The charges of one value of `iteration_s`. `prompt_s[p]`: the least charge for p prompt
    tokens, in any chunks. `decodes_s[c]`: the sum over decode steps on contexts 1..c.

    A step on a short context may cost less than nothing. `decodes_s` counts such a step as 0, and
    `credit_s[c]` sums the amounts below 0.
    """

    iteration_s: float
    prompt_s: Seconds
    decodes_s: Seconds
    credit_s: Seconds


def iteration_range_s(strata: tuple[Stratum, ...]) -> tuple[float, float]:
    """The least and the greatest useful `iteration_s`: above, some chunk would be paid for."""
    least_s = [0.0 if s.curve_s else s.base_s for s in strata]
    most_s = [
        s.base_s if s.curve_s else s.base_s + s.prefill_token_s * (s.above + 1) for s in strata
    ]
    low_s = max(0.0, min(least_s))
    return low_s, max(low_s, min(*most_s, max(s.base_s for s in strata)))


@lru_cache(maxsize=32)
def charges(
    strata: tuple[Stratum, ...], iteration_s: float, longest_tokens: int, *, cached: bool = False
) -> Charges:
    """The charges of up to `longest_tokens`; `iteration_s` is within `iteration_range_s`. `cached`:
    what was computed may be found again.
    """
    context = np.arange(longest_tokens + 1, dtype=np.float64)
    step_s = np.min(
        [
            s.decode_s + s.decode_context_s * context + _share(s, iteration_s, np.ones(1))
            for s in strata
        ],
        axis=0,
    )
    prompt_s = _least_prompt_s(strata, iteration_s, longest_tokens)
    # After a preemption a token may come from computing its whole context anew.
    found_s = np.maximum.accumulate(prompt_s[:-1]) if cached else 0.0
    step_s[:-1] = np.minimum(step_s[:-1], prompt_s[1:] - found_s)
    step_s[0] = 0.0
    return Charges(
        iteration_s,
        prompt_s,
        np.cumsum(np.maximum(step_s, 0.0)),
        np.cumsum(np.maximum(-step_s, 0.0)),
    )


def _share(stratum: Stratum, iteration_s: float, tokens: Seconds) -> Seconds:
    """The part of base_s - iteration_s that a piece of work of `tokens` pays: at most its part of a
    positive difference, at least its part of a negative one.

    Under a curve, the piece pays its tokens' part of the curve less iteration_s, in the batch of at
    least `tokens` in which that part is least.
    """
    if stratum.curve_s:
        curve_s = np.array(stratum.curve_s)
        # Past the end of the curve the part of a token lies between the last one's and `beyond_s`.
        part_s = np.minimum(
            (curve_s - iteration_s) / np.arange(1, len(curve_s) + 1), stratum.beyond_s
        )
        part_s = np.minimum.accumulate(part_s[::-1])[::-1]
        found: Seconds = tokens * part_s[np.clip(tokens.astype(np.int64), 1, len(part_s)) - 1]
        return found
    rest_s = stratum.base_s - iteration_s
    if rest_s > 0:
        return rest_s * tokens / stratum.up_to
    return rest_s * np.minimum(1.0, tokens / (stratum.above + 1))


def _least_prompt_s(
    strata: tuple[Stratum, ...], iteration_s: float, longest_tokens: int
) -> Seconds:
    """[longest_tokens + 1] the least charge of a prompt, by its last chunk: least[t] = min over
    cached c < t of least[c] + the chunk of t - c tokens on c.
    """
    new = np.arange(longest_tokens + 1, dtype=np.float64)
    # Per stratum, the charge of a chunk by its new tokens, without cached ones; reversed, so that a
    # slice runs along rising cached tokens.
    alone = []
    for s in strata:
        chunk_s = (
            s.chunk_s
            + s.prefill_token_s * new
            + s.prefill_sq_s * new * new
            + _share(s, iteration_s, new)
        )
        chunk_s[new > s.up_to] = math.inf
        alone.append(np.ascontiguousarray(np.maximum(chunk_s, 0.0)[::-1]))
    cross = any(s.prefill_cross_s for s in strata)
    least_s = np.zeros(longest_tokens + 1)
    on_s = [s.prefill_context_s * new for s in strata]
    for t in range(1, longest_tokens + 1):
        # A chunk of t - c new tokens on c = 0 .. t - 1 stands in the reversed arrays from index
        # longest - t on.
        options = [
            one[longest_tokens - t : longest_tokens] + on[:t]
            for one, on in zip(alone, on_s, strict=True)
        ]
        if cross:
            pairs = new[:t] * (t - new[:t])
            options = [
                option + s.prefill_cross_s * pairs
                for option, s in zip(options, strata, strict=True)
            ]
        chunk_s = options[0]
        for option in options[1:]:
            np.minimum(chunk_s, option, out=chunk_s)
        least_s[t] = (least_s[:t] + chunk_s).min()
    return least_s
