"""The four definitions in the literature of when a request's SLO counts as met; each is an option.

A request meets its SLO if it finished (by stop or length) and kept every bound that its tier
states. The definitions differ in how they judge the pace, the bound `tbt_s`:

deadline     Token n by its own deadline, arrival + TTFT + (n-1) TBT; being early banks slack.
             Source: [qoserve] Eq. 1-3. The verdict of a live request uses this one.
mean-tpot    The mean time per output token after the first is at most TBT. Source: [sola],
             [ascendra], [adaserve].
max-tpot-10  The mean over each 10 tokens after the first is at most TBT, for the worst of them.
             Source: [slos-serve] section 6, "we measure the TPOT every 10 tokens". The paper does
             not say how it judges a rest of fewer than 10 tokens; here the last 10 tokens are
             judged together. An output of 2 to 10 tokens is judged as one window.
ttlt         Only the time to the last token counts. For a tier without a TTLT that bound is the
             deadline that TTFT and TBT give the last token ([qoserve] Eq. 2).

The first three judge TTFT and TTLT alike: a tier is not held to a bound it does not have, so all
four judge a tier with only a TTLT the same. Where a tier lacks a bound, `ttlt` works as follows: a
tier without TTFT has its pace counted from its first token, and a tier with only a TTFT is held to
that.

A request that thinks has a pace for each of its two stages and is judged stage by stage
([slos-serve] sections 1 and 6). A mean or a window of ten tokens lies within one stage: thinking
tokens are judged against `thinking_tbt_s`, later ones against `tbt_s`. Deadlines grow by the pace
of the stage that a token is in.

TTFT and TTLT begin when the request arrives, queueing included. An output of one token has no pace.
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from shared.core.verdict import GOOD_ENDS
from shared.errors import ConfigError
from shared.schemas import Verdict
from shared.vocabulary import Slo

DEADLINE, MEAN_TPOT, MAX_TPOT_10, TTLT = "deadline", "mean-tpot", "max-tpot-10", "ttlt"
DEFINITIONS = (DEADLINE, MEAN_TPOT, MAX_TPOT_10, TTLT)
WINDOW_TOKENS = 10  # SLOs-Serve section 6
# sums of deadlines round: a token late by less is on time, as in shared.vocabulary.Measure
CLOSE_S = 1e-9

Seconds = NDArray[np.float64]
TokenTimes = Sequence[Sequence[float]]  # for each request, the instants of its tokens, ascending


class Missed(IntEnum):
    """The bound that was broken, the first that applies. TBT: the pace, however it is judged."""

    NOTHING = 0  # the SLO was met
    END = 1  # the request did not finish
    TTFT = 2
    TBT = 3
    TTLT = 4


def check(definition: str) -> str:
    """The name itself. Raises ConfigError for any other than the four."""
    if definition not in DEFINITIONS:
        raise ConfigError(f"definition `{definition}`: there are {', '.join(DEFINITIONS)}")
    return definition


def needs_token_times(definition: str) -> bool:
    """Tells whether this definition needs token times besides the verdicts."""
    return definition == MAX_TPOT_10


def missed(
    definition: str,
    verdicts: Sequence[Verdict | None],
    slos: Sequence[Slo],
    token_unix_s: TokenTimes | None = None,
) -> NDArray[np.int8]:
    """[requests] the bound that each one broke, as Missed. A verdict is None where the run ended
    first.

    `token_unix_s` is needed where `needs_token_times`. Raises ConfigError for an unknown
    definition.
    """
    found = np.full(len(verdicts), Missed.END, dtype=np.int8)
    ended = [
        (n, v)
        for n, v in enumerate(verdicts)
        if v is not None and v.finish_reason in GOOD_ENDS and v.ttlt_s is not None
    ]
    if not ended:
        return found
    numbers = np.array([n for n, _ in ended])
    of = [verdict for _, verdict in ended]
    ttft_s, ttlt_s = (
        np.array(values, dtype=np.float64)
        for values in ([v.ttft_s for v in of], [v.ttlt_s for v in of])
    )
    ttft_due_s, tbt_due_s, ttlt_due_s, thinking_due_s = (
        np.array(
            [math.inf if (bound_s := bound_of(slos[n])) is None else bound_s for n, _ in ended]
        )
        for bound_of in _BOUNDS
    )
    late = np.zeros((len(Missed), len(ended)), dtype=bool)
    thinking = np.array([v.thinking_tokens for v in of])
    thinking_gaps = np.maximum(thinking - 1, 0)
    # between tokens of the response, and before its first
    gaps = np.array([v.output_tokens for v in of]) - 1 - thinking_gaps
    if check(definition) == TTLT:
        by_pace_s = _owed_s(thinking_gaps, thinking_due_s) + _owed_s(gaps, tbt_due_s)
        last_due_s = _last_due_s(ttft_s, by_pace_s, ttft_due_s, tbt_due_s, ttlt_due_s)
        late[Missed.TTLT] = ttlt_s > last_due_s + np.where(np.isfinite(ttlt_due_s), 0.0, CLOSE_S)
        late[Missed.TTFT] = np.isinf(last_due_s) & (ttft_s > ttft_due_s + CLOSE_S)
    else:
        late[Missed.TTFT], late[Missed.TTLT] = ttft_s > ttft_due_s + CLOSE_S, ttlt_s > ttlt_due_s
        if definition == DEADLINE:
            unmet = ~np.array([v.slo_met for v in of])
            late[Missed.TBT] = unmet & ~late[Missed.TTLT]
            late[Missed.TTFT] &= unmet
            late[Missed.TTLT] &= unmet
        else:
            assert token_unix_s is not None or not needs_token_times(definition)
            times = [] if token_unix_s is None else [token_unix_s[n] for n, _ in ended]
            pace_s, thinking_s = _paces_s(definition, of, gaps, thinking_gaps, times)
            late[Missed.TBT] = (pace_s > tbt_due_s + CLOSE_S) | (
                thinking_s > thinking_due_s + CLOSE_S
            )
    found[numbers] = late.argmax(axis=0)  # 0, that is NOTHING, where none is set
    return found


def _paces_s(
    definition: str,
    verdicts: Sequence[Verdict],
    gaps: NDArray[np.int64],
    thinking_gaps: NDArray[np.int64],
    times: TokenTimes,
) -> tuple[Seconds, Seconds]:
    """The pace of each response, and of its thinking, by `mean-tpot` or `max-tpot-10`."""
    if definition == MEAN_TPOT:
        both_s = np.array([v.mean_tpot_s or 0.0 for v in verdicts])
        thinking_s = np.array([v.thinking_tpot_s or 0.0 for v in verdicts])
        response_s = both_s * (gaps + thinking_gaps) - thinking_s * thinking_gaps
        return response_s / np.maximum(gaps, 1), thinking_s
    stages = list(zip(times, [v.thinking_tokens for v in verdicts], strict=True))
    responses = [at_s[k - 1 :] if k else at_s for at_s, k in stages]
    return worst_tpot_s(responses), worst_tpot_s([at_s[:k] for at_s, k in stages])


_BOUNDS: tuple[Callable[[Slo], float | None], ...] = (
    lambda slo: slo.ttft_s,
    lambda slo: slo.tbt_s,
    lambda slo: slo.ttlt_s,
    lambda slo: slo.thinking_tbt_s,
)


def _owed_s(gaps: NDArray[np.int64], pace_s: Seconds) -> Seconds:
    """`gaps` times the pace; 0 where there are no gaps."""
    return np.multiply(gaps, pace_s, out=np.zeros(len(gaps)), where=gaps > 0)


def _last_due_s(
    ttft_s: Seconds,
    by_pace_s: Seconds,
    ttft_due_s: Seconds,
    tbt_due_s: Seconds,
    ttlt_due_s: Seconds,
) -> Seconds:
    """The seconds after arrival at which the last token is due by definition `ttlt`: TTLT, else
    TTFT and paces; inf where there is neither.
    """
    begin_s = np.where(np.isfinite(ttft_due_s), ttft_due_s, ttft_s)
    return np.where(
        np.isfinite(ttlt_due_s),
        ttlt_due_s,
        np.where(np.isfinite(tbt_due_s), begin_s + by_pace_s, math.inf),
    )


def worst_tpot_s(token_unix_s: TokenTimes, block: int = 1024) -> Seconds:
    """[requests] the largest mean time per token over 10 tokens (`max-tpot-10` above); 0 for
    outputs of one token or none.

    `block`: requests worked on at once, which bounds the memory.
    """
    worst_s = np.zeros(len(token_unix_s))
    for begin in range(0, len(token_unix_s), block):
        times = [np.asarray(one, dtype=np.float64) for one in token_unix_s[begin : begin + block]]
        at_s, tokens = np.concatenate(times), np.array([len(one) for one in times])
        starts = np.cumsum(tokens) - tokens
        owner = np.repeat(np.arange(len(times)), tokens)
        within = np.arange(len(at_s)) - starts[owner]  # 0, 1, ... in each request
        ends = np.flatnonzero((within > 0) & (within % WINDOW_TOKENS == 0))
        of = worst_s[begin : begin + block]
        np.maximum.at(of, owner[ends], (at_s[ends] - at_s[ends - WINDOW_TOKENS]) / WINDOW_TOKENS)
        paced = np.flatnonzero(tokens > 1)
        last, wide = (starts + tokens - 1)[paced], np.minimum(tokens - 1, WINDOW_TOKENS)[paced]
        of[paced] = np.maximum(of[paced], (at_s[last] - at_s[last - wide]) / wide)
    return worst_s
