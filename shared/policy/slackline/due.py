"""The instants at which tokens are due: one notion over TTFT, TBT, thinking and TTLT.

- *Prefill* must have ended when the next token is due, and early enough that the output still fits
  before a TTLT ends.
- *Pace* is the longest gap between two tokens: the tightest TBT of the stages to come, or the time
  that a TTLT leaves to each token still expected. No pace is looser than LOOSE_S, so that no
  request holds KV for ever.
- *The next token of a decode* is due a pace after its newest one. Where no gap is longer than the
  pace, windows of any length hold it, and so do the mean and the deadline of each token.
- *Time earned*: where the deadline of each token judges, or that of the last one, tokens that come
  early earn time. It is spread over the tokens to come, as if the pace was looser, as far as a TTLT
  allows.
- *Catching up*: where the deadline of the last token alone judges, a first token that is late can
  be made up for, by a decode that is faster than its pace.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from shared.columns import Ints
from shared.policy.chunk import Rows
from shared.policy.lengths import OutputLengths
from shared.policy.seam import DEFINITIONS, Bools, Floats, View
from shared.schemas import Offer
from shared.vocabulary import Definition, Slo

_DEADLINE = DEFINITIONS.index(Definition.DEADLINE)
_MEAN = DEFINITIONS.index(Definition.MEAN_TPOT)
_TTLT = DEFINITIONS.index(Definition.TTLT)

# By these, tokens that come early earn time.
EARNING = (Definition.DEADLINE, Definition.TTLT)
LOOSE_S = 0.4  # as QoServe's artifact for decodes without a TBT
# A prefill without any deadline is due so long after its arrival, so that it does not wait for
# ever. No other prefill counts as due later than this from now.
FAR_S = 3600.0
# A TTLT keeps a quarter of itself for its output, but no more than this for each token.
RESERVE_SHARE, RESERVE_MOST_S = 0.25, 0.25
# The longest output is left no more than this share of the TTLT, unless the mean one needs more.
MOST_SHARE = 0.65
# The output may well be so much of the longest that is expected.
LIKELY = 0.5
# Many an output is so short beside the mean: until there is no time for that, there is hope.
SHORT = 0.25
# An output that is longer than expected may go on for so much of what it has.
AS_LONG_AGAIN = 0.5
# Iterations may be so much longer than lately while the output is made.
STEP_MARGIN = 1.2


class Due(NamedTuple):
    """The bounds of several requests, in columns."""

    prefill_unix_s: Floats  # when the prefill must have ended
    pace_s: Floats
    output_tokens: Floats  # the most that are expected still to come
    ttlt_pace_s: Floats  # the pace that the TTLT alone asks for; inf without one


class Facts(NamedTuple):
    """The columns that the bounds follow from, as in the view."""

    arrived_unix_s: Floats
    next_due_unix_s: Floats
    last_due_unix_s: Floats
    tightest_tbt_s: Floats
    generated_tokens: Floats
    upper_tokens: Floats  # the longest output expected
    mean_tokens: Floats


def due_of_rows(view: View, lengths: OutputLengths, step_s: float) -> Due:
    """[rows] the bounds of the requests that the replica holds. `step_s`: seconds of an iteration
    with decodes lately.
    """
    # numpy is half as fast where an operation has to convert one of its columns
    application, most = view.application.astype(np.intp), view.max_tokens.astype(np.float64)
    upper = np.minimum(lengths.upper(view.applications)[application], most)
    mean = np.minimum(lengths.mean(view.applications)[application], most)
    return _due(
        Facts(
            view.arrived_unix_s,
            view.next_due_unix_s,
            view.last_due_unix_s,
            view.tightest_tbt_s,
            view.generated_tokens.astype(np.float64),
            upper,
            mean,
        ),
        view.start_unix_s,
        step_s,
    )


def eased(view: View, due: Due) -> Due:
    """The bounds with looser paces for decodes that deadlines judge and that have earned time."""
    judged = view.in_decode & earns(view.definition)
    rows = (judged & np.isfinite(view.next_due_unix_s)).nonzero()[0]
    if not len(rows):
        return due
    own_s = np.minimum(view.tightest_tbt_s[rows], LOOSE_S)
    early_s = view.next_due_unix_s[rows] - view.start_unix_s - own_s
    pace_s = due.pace_s.copy()
    paces_s = eased_s(own_s, early_s, due.output_tokens[rows])
    pace_s[rows] = np.minimum(paces_s, due.ttlt_pace_s[rows])
    return due._replace(pace_s=pace_s)


def as_judged(view: View) -> View:
    """The view without the bounds that count for nothing: where `ttlt` judges a request that has a
    TTLT, its TTFT and its paces.
    """
    free: Bools = view.definition == _TTLT
    if np.count_nonzero(free):
        free &= view.has_ttlt
        free &= np.isfinite(view.next_due_unix_s) | np.isfinite(view.tightest_tbt_s)
    if not np.count_nonzero(free):
        return view
    return replace(
        view,
        first_due_unix_s=np.where(free, np.inf, view.first_due_unix_s),
        next_due_unix_s=np.where(free, np.inf, view.next_due_unix_s),
        tbt_s=np.where(free, np.inf, view.tbt_s),
        tightest_tbt_s=np.where(free, np.inf, view.tightest_tbt_s),
    )


def as_offer_judged(offer: Offer) -> Offer:
    """The same for an offer."""
    slo = offer.slo
    if slo.definition is not Definition.TTLT or slo.ttlt_s is None:
        return offer
    whole = Slo(ttlt_s=slo.ttlt_s, definition=slo.definition)
    if slo == whole:
        return offer
    return structs.replace(offer, slo=whole, next_due_unix_s=math.inf)


def is_whole(offer: Offer) -> bool:
    """Tells whether nothing is due before its last token, as `View.whole` has it."""
    return offer.slo.ttlt_s is not None and math.isinf(offer.next_due_unix_s)


def earns(definition: Ints) -> Bools:
    """[requests] those that a deadline judges, of each token or of the last."""
    found: Bools = definition == _DEADLINE
    found |= definition == _TTLT
    return found


def catches_up(view: View) -> Bools:
    """[rows] those of which a late first token can be made up for: the deadline that TTFT and pace
    give the last token is all that judges them.
    """
    able: Bools = view.definition == _TTLT
    if np.count_nonzero(able):
        able &= ~view.has_ttlt & np.isfinite(view.tightest_tbt_s)
    return able


def can_wait(slo: Slo) -> bool:
    """Tells whether a request that cannot be in time just now may well be later: it has a TTLT and
    no TTFT that counts, or can catch up.
    """
    if slo.definition is Definition.TTLT and (slo.tbt_s, slo.ttlt_s) != (None, None):
        return True
    return slo.ttlt_s is not None and slo.ttft_s is None


def in_haste(view: View) -> Bools:
    """[rows] the decodes that can catch up and have no time to lose: the next token is due in less
    than a pace.
    """
    haste = catches_up(view)
    if np.count_nonzero(haste):
        due_s = view.next_due_unix_s - view.start_unix_s
        haste &= view.in_decode & (due_s < view.tightest_tbt_s)
    return haste


def eased_s(pace_s: Floats, early_s: Floats, output_tokens: Floats) -> Floats:
    """[requests] the paces of requests that deadlines judge. `early_s`: the next token may come so
    long before it is due. `output_tokens`: still to come.
    """
    paces: Floats = pace_s + np.maximum(early_s, 0.0) / output_tokens
    return paces


def hope_unix_s(
    view: View, rows: Rows, lengths: OutputLengths, step_s: float, *, means: float = 1.0
) -> Floats:
    """[rows] when the prefill must have ended for a short output to be in time, or for one of so
    many `means` to catch up. `step_s`: as in `due_of_rows`.
    """
    mean = _mean_left(view, rows, lengths)
    last_unix_s = view.last_due_unix_s[rows] - SHORT * mean * step_s
    first_unix_s = view.next_due_unix_s[rows]
    able = catches_up(view)[rows]
    if np.count_nonzero(able):
        gains_s = means * mean[able] * np.maximum(view.tightest_tbt_s[rows][able] - step_s, 0.0)
        first_unix_s[able] += gains_s
    hope: Floats = np.minimum(first_unix_s, last_unix_s)
    return hope


def likely_unix_s(view: View, rows: Rows, lengths: OutputLengths, step_s: float) -> Floats:
    """[rows] when the prefill must have ended for an output of the mean to be in time. `step_s`: as
    in `due_of_rows`.
    """
    output_s = STEP_MARGIN * step_s * _mean_left(view, rows, lengths)
    likely: Floats = np.minimum(view.next_due_unix_s[rows], view.last_due_unix_s[rows] - output_s)
    return likely


def _mean_left(view: View, rows: Rows, lengths: OutputLengths) -> Floats:
    """[rows] the tokens still to come of an output of the mean, one at least."""
    mean = lengths.mean(view.applications)[view.application[rows]]
    mean = np.minimum(mean, view.max_tokens[rows])
    left: Floats = np.maximum(mean - view.generated_tokens[rows], 1.0)
    return left


def due_of_offers(
    offers: Sequence[Offer], now_unix_s: float, lengths: OutputLengths, step_s: float
) -> Due:
    """[offers] the bounds of requests that are offered or promised."""
    most = np.array([offer.max_tokens for offer in offers], dtype=np.float64)
    names = [offer.application for offer in offers]
    upper, mean = np.minimum(lengths.upper(names), most), np.minimum(lengths.mean(names), most)
    facts = Facts(
        np.array([offer.arrived_unix_s for offer in offers]),
        np.array([offer.next_due_unix_s for offer in offers]),
        np.array([offer.slo.last_due_unix_s(offer.arrived_unix_s) for offer in offers]),
        np.array([offer.slo.tightest_pace_s(offer.thinking) for offer in offers]),
        np.array([offer.generated_tokens for offer in offers], dtype=np.float64),
        upper,
        mean,
    )
    return _due(facts, now_unix_s, step_s)


def token_due_unix_s(view: View, due: Due) -> Floats:
    """[rows] the instant at which the next token of each decode is due, by its newest one."""
    newest = view.newest_token_unix_s
    return np.where(np.isfinite(newest), newest, view.start_unix_s) + due.pace_s


def left_s(view: View, due: Due) -> Floats:
    """[rows] the time that a TTLT leaves to each token still expected; inf without one, and once it
    has passed.
    """
    until_s = view.last_due_unix_s - view.start_unix_s
    return np.where(until_s > 0, until_s / due.output_tokens, np.inf)


def sits_out_until_s(due: Due, token_due_s: Floats, each_s: Floats) -> Floats:
    """[rows] until when each decode may sit out, in seconds from the start: until its next token is
    due. Before a TTLT it is half of the time `each_s` that is left for each token: its output may
    turn out to be longer than expected, and to sit out saves no work.
    """
    return token_due_s + (np.minimum(due.pace_s, LIKELY * each_s) - due.pace_s)


def put_off_by_mean(view: View, token_due_s: Floats, *, by_deadlines: bool) -> Floats:
    """[rows] when the next token of each decode is due, in seconds from the start: where the mean
    pace judges the request, tokens that came early put it off. `by_deadlines`: also where deadlines
    judge. They would allow more: the first token may have come before it was due.
    """
    judged = view.definition == _MEAN
    if by_deadlines:
        judged |= earns(view.definition)
        haste = in_haste(view)
        if np.count_nonzero(haste):
            judged &= ~haste
    if not np.count_nonzero(judged):
        return token_due_s
    paced = np.isfinite(view.tbt_s) & np.isfinite(view.first_token_unix_s)
    rows = (judged & view.in_decode & paced).nonzero()[0]
    if not len(rows):
        return token_due_s
    due_unix_s = view.first_token_unix_s[rows] + view.generated_tokens[rows] * view.tbt_s[rows]
    put_off = token_due_s.copy()
    put_off[rows] = np.maximum(put_off[rows], due_unix_s - view.start_unix_s)
    return put_off


def put_off_by_deadline(view: View, token_due_s: Floats) -> Floats:
    """[rows] the same where deadlines judge the request."""
    rows = (earns(view.definition) & np.isfinite(view.next_due_unix_s)).nonzero()[0]
    put_off = token_due_s.copy()
    put_off[rows] = np.maximum(put_off[rows], view.next_due_unix_s[rows] - view.start_unix_s)
    return put_off


def _due(facts: Facts, now_unix_s: float, step_s: float) -> Due:
    made = facts.generated_tokens
    left = np.maximum(facts.upper_tokens - made, np.maximum(AS_LONG_AGAIN * made, 1.0))
    last = facts.last_due_unix_s
    without_ttlt = np.isinf(last)
    prefill = np.minimum(facts.next_due_unix_s, now_unix_s + FAR_S)
    undated = without_ttlt & np.isinf(facts.next_due_unix_s)
    if np.count_nonzero(undated):
        prefill[undated] = facts.arrived_unix_s[undated] + FAR_S
    pace = np.minimum(facts.tightest_tbt_s, LOOSE_S)
    if np.count_nonzero(without_ttlt) == len(last):
        return Due(prefill, pace, left, np.full(len(last), np.inf))
    # a bound by a TTLT that is absent is inf, and changes nothing
    ttlt_s = last - facts.arrived_unix_s
    least_s = STEP_MARGIN * step_s
    each_s = ttlt_s * RESERVE_SHARE / np.maximum(facts.upper_tokens, 1.0)
    each_s = np.maximum(least_s, np.minimum(each_s, RESERVE_MOST_S))
    mean = np.maximum(facts.mean_tokens - made, 1.0)
    most_s = np.maximum(mean * least_s, MOST_SHARE * ttlt_s)
    prefill = np.minimum(prefill, last - np.minimum(left * each_s, most_s))
    until_s = last - now_unix_s
    likely_s = until_s / np.maximum(mean, LIKELY * left)
    spread_s = np.minimum(likely_s, np.maximum(until_s / left, least_s))
    # beyond rescue: it keeps its pace, and shortens no batch
    spread_s[until_s / mean < step_s / STEP_MARGIN] = LOOSE_S
    ttlt_pace_s = np.maximum(spread_s, 1e-3)
    return Due(prefill, np.minimum(pace, ttlt_pace_s), left, ttlt_pace_s)
