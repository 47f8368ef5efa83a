"""The definitions of when a request's SLO counts as met, four of them from the literature; an SLO
names one. Live verdicts, simulated ones and the load client's all come from here.

A request meets its SLO if it finished (by stop or length) and kept every bound that its tier
states. The definitions differ in how they judge the pace, the bound `tbt_s`:

deadline     Token n by its own deadline, arrival + TTFT + (n-1) TBT; being early banks slack.
             Source: [qoserve] Eq. 1-3. It counts where an SLO names no other.
mean-tpot    The mean time per output token after the first is at most TBT. Source: [sola],
             [ascendra], [adaserve].
max-tpot-10  The mean over each 10 tokens after the first is at most TBT, for the worst of them.
             Source: [slos-serve] section 6, "we measure the TPOT every 10 tokens". The paper does
             not say how it judges a rest of fewer than 10 tokens; here the last 10 tokens are
             judged together. An output of 2 to 10 tokens is judged as one window.
ttlt         Only the time to the last token counts. For a tier without a TTLT that bound is the
             deadline that TTFT and TBT give the last token ([qoserve] Eq. 2).
every-gap    No gap between two tokens is longer than TBT, but for `long_gap_share` of a request's
             gaps. Ours: for readers who notice each pause. Tokens that come together have no gap.

All but `ttlt` judge TTFT and TTLT alike: a tier is not held to a bound it does not have, so all
five judge a tier with only a TTLT the same. Where a tier lacks a bound, `ttlt` works as follows: a
tier without TTFT has its pace counted from its first token, and a tier with only a TTFT is held to
that.

A request that thinks has a pace for each of its two stages and is judged stage by stage
([slos-serve] sections 1 and 6). A mean or a window of ten tokens lies within one stage: thinking
tokens are judged against `thinking_tbt_s`, later ones against `tbt_s`. Deadlines grow by the pace
of the stage that a token is in.

TTFT and TTLT begin when the request arrives, queueing included. An output of one token has no pace.
"""

import math
from typing import assert_never

from shared.measure import CLOSE_S, Measure
from shared.vocabulary import Definition, Missed, Slo


def missed(measure: Measure, slo: Slo, arrived_unix_s: float) -> Missed:
    """The bound that a request with a good end and this measure broke. `slo` is in seconds."""
    if not measure.tokens:
        return Missed.END
    ttft_s, ttlt_s = measure.first_unix_s - arrived_unix_s, measure.last_unix_s - arrived_unix_s
    if slo.definition is Definition.TTLT:
        return _by_last_token(measure, slo, ttft_s, ttlt_s)
    late_end = ttlt_s > _or_inf(slo.ttlt_s)
    match slo.definition:
        case Definition.DEADLINE:
            in_time = measure.last_unix_s <= slo.last_due_unix_s(arrived_unix_s)
            if in_time and not measure.late_tokens:
                return Missed.NOTHING
            off_pace = not late_end
        case Definition.MEAN_TPOT:
            off_pace = _too_slow(slo, *_mean_tpots_s(measure, slo))
        case Definition.MAX_TPOT_10:
            off_pace = _too_slow(slo, *_worst_tpots_s(measure, slo))
        case Definition.EVERY_GAP:
            off_pace = measure.long_gaps > (slo.long_gap_share or 0.0) * (measure.tokens - 1)
        case _:
            assert_never(slo.definition)
    if ttft_s > _or_inf(slo.ttft_s) + CLOSE_S:
        return Missed.TTFT
    return Missed.TBT if off_pace else Missed.TTLT if late_end else Missed.NOTHING


def _by_last_token(measure: Measure, slo: Slo, ttft_s: float, ttlt_s: float) -> Missed:
    """By TTLT, else by the deadline that TTFT and paces give the last token, else by TTFT."""
    if slo.ttlt_s is not None:
        return Missed.TTLT if ttlt_s > slo.ttlt_s else Missed.NOTHING
    if slo.tbt_s is None:
        return Missed.TTFT if ttft_s > _or_inf(slo.ttft_s) + CLOSE_S else Missed.NOTHING
    thinking_gaps = max(measure.thought(slo) - 1, 0)
    gaps = measure.tokens - 1 - thinking_gaps
    by_pace_s = (thinking_gaps * slo.pace_s(True) if thinking_gaps else 0.0) + gaps * slo.tbt_s
    due_s = (ttft_s if slo.ttft_s is None else slo.ttft_s) + by_pace_s
    return Missed.TTLT if ttlt_s > due_s + CLOSE_S else Missed.NOTHING


def _too_slow(slo: Slo, response_s: float, thinking_s: float) -> bool:
    return response_s > slo.pace_s(False) + CLOSE_S or thinking_s > slo.pace_s(True) + CLOSE_S


def _mean_tpots_s(measure: Measure, slo: Slo) -> tuple[float, float]:
    """The mean time per token of the response, and of the thinking."""
    thinking_gaps = max(measure.thought(slo) - 1, 0)
    gaps = measure.tokens - 1 - thinking_gaps
    thinking_s = _mean_s(measure.thought_unix_s - measure.first_unix_s, thinking_gaps)
    both_s = _mean_s(measure.last_unix_s - measure.first_unix_s, measure.tokens - 1)
    response_s = both_s * (measure.tokens - 1) - thinking_s * thinking_gaps
    return response_s / max(gaps, 1), thinking_s


def _worst_tpots_s(measure: Measure, slo: Slo) -> tuple[float, float]:
    """The worst mean over ten tokens of the response, and of the thinking."""
    windows = measure.windows
    assert windows is not None, "a measure that was begun for another definition"
    if measure.thought(slo) == measure.tokens:
        return 0.0, windows.present_s()
    return windows.present_s(), windows.thinking_worst_s


def _mean_s(span_s: float, gaps: int) -> float:
    return span_s / gaps if gaps > 0 else 0.0


def _or_inf(bound_s: float | None) -> float:
    return math.inf if bound_s is None else bound_s
