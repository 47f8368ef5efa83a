"""Turns every SLO into bounds: an instant by which the prefill must have ended, and a pace for the
tokens after it.

- The prefill is due when the next token is, and so early before a TTLT that the output can be made
  at the speed of lately.
- The pace is the time between tokens of the SLO, or what a TTLT leaves to each token still
  expected, whichever is shorter.
- The definition that judges says how late the next token of a decode may come: its deadline, so
  many paces after the first token, or the windows of ten that it is in (windows.py).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from shared.columns import Ints
from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.lengths import OutputLengths
from shared.policy.seam import DEFINITIONS, Bools, Floats, View
from shared.policy.slackline.prices import Prices
from shared.policy.slackline.windows import Windows
from shared.schemas import Offer
from shared.vocabulary import Definition, Slo

DEADLINE = DEFINITIONS.index(Definition.DEADLINE)
WINDOWS = DEFINITIONS.index(Definition.MAX_TPOT_10)
LAST = DEFINITIONS.index(Definition.TTLT)
GAPS = DEFINITIONS.index(Definition.EVERY_GAP)

LOOSE_S = 0.2  # no pace is looser, so that no request holds KV for long
FAR_S = 3600.0  # a prefill without any deadline is due so long after its arrival
STEP_MARGIN = 1.2  # iterations may be so much longer than lately while an output is made
RESERVE = 0.65  # of a TTLT, the most that is kept for the longest output expected
HASTE = 4.0  # the longest output expected is made so many times as fast as its TTLT asks
SHARE = 0.6  # of the time, the most for passes that TTLTs ask for, while a prefill waits
EARLY_S = 0.2  # what is more important is due so much earlier, in no less than half its time
MARGIN_S = 0.001  # live, nine of ten iterations come within 2 ms


class Learned(NamedTuple):
    """The policy's knowledge of outputs and iterations, and the prices."""

    lengths: OutputLengths
    upper: Floats  # [applications of the view] the longest output expected
    mean: Floats
    step_s: float  # of an iteration with decodes, lately
    prices: Prices


class Left(NamedTuple):
    """[requests] the rest of outputs, and the pace that a TTLT leaves to their tokens."""

    tokens: Floats  # of the longest output expected
    mean: Floats  # of the mean output
    asked_s: Floats  # inf without a TTLT


def _left(made: Floats | Ints, most: Floats, mean: Floats, last_s: Floats, step_s: float) -> Left:
    """`most`, `mean`: tokens of the whole output. `last_s`: seconds until the last is due."""
    tokens = np.maximum(most - made, np.maximum(made / 2, 1.0))
    mean = np.maximum(mean - made, 1.0)
    if not np.count_nonzero(last_s < math.inf):
        return Left(tokens, mean, last_s)
    likely_s, longest_s = last_s / np.maximum(mean, tokens / 2), last_s / (HASTE * tokens)
    asked_s = np.minimum(likely_s, np.maximum(longest_s, STEP_MARGIN * step_s))
    # beyond rescue: it keeps its pace, and shortens no iteration
    lost = last_s / mean < step_s / STEP_MARGIN
    return Left(tokens, mean, np.where(lost, LOOSE_S, np.maximum(asked_s, 1e-3)))


class Prefills(NamedTuple):
    """Requests that wait for their prefill, in columns; seconds from now."""

    rows: Rows  # of the view; 0 for offers
    due_s: Floats  # until the prefill must have ended
    hope_s: Floats  # the same if the output is a mean one
    waits: Bools  # it may wait until then: nothing is due before its last token
    pace_s: Floats  # of its tokens
    tbt_s: Floats  # the pace of the SLO
    output_tokens: Floats  # the most that are expected
    seconds: Floats  # of the prefill
    blocks: Floats  # of KV that it needs beside what it holds
    decode_s: Floats  # of one token of its decode
    value: Floats  # importance

    def taken(self, index: Rows | Bools | slice) -> "Prefills":
        return Prefills._make([column[index] for column in self])

    def beside(self, other: "Prefills") -> "Prefills":
        return Prefills._make([np.concatenate(pair) for pair in zip(self, other, strict=True)])


def prefills_of(view: View, rows: Rows, learned: Learned) -> Prefills:
    """[rows]"""
    now, target, cached = view.start_unix_s, view.target_tokens[rows], view.computed_tokens[rows]
    application, most = view.application[rows], view.max_tokens[rows]
    facts = (
        view.arrived_unix_s[rows] - now,
        view.next_due_unix_s[rows] - now,
        view.last_due_unix_s[rows] - now,
        view.tightest_tbt_s[rows],
        view.generated_tokens[rows],
        np.minimum(learned.upper[application], most),
        np.minimum(learned.mean[application], most),
        *(target, cached),
    )
    blocks = np.maximum(-(-target // view.block_tokens) - view.kv_held_blocks[rows], 0.0)
    return _prefills(rows, facts, blocks, view.importance[rows], learned)


def prefills_of_offers(offers: Sequence[Offer], view: View, learned: Learned) -> Prefills:
    """[offers]"""
    names, now = [offer.application for offer in offers], view.start_unix_s
    rows = [
        (
            offer.arrived_unix_s - now,
            offer.next_due_unix_s - now,
            offer.slo.last_due_unix_s(offer.arrived_unix_s) - now,
            offer.slo.tightest_pace_s(offer.thinking),
            offer.generated_tokens,
            offer.max_tokens,
            offer.prompt_tokens + offer.generated_tokens,
            offer.importance,
        )
        for offer in offers
    ]
    arrived, next_s, last_s, tbt, made, most, tokens, value = np.array(rows).T
    upper = np.minimum(learned.lengths.upper(names), most)
    mean, none = np.minimum(learned.lengths.mean(names), most), np.zeros(len(offers))
    facts = (arrived, next_s, last_s, tbt, made, upper, mean, tokens, none)
    blocks = np.ceil(tokens / view.block_tokens)
    return _prefills(none.astype(np.intp), facts, blocks, value, learned)


def _prefills(
    rows: Rows, facts: Sequence[NDArray[Any]], blocks: Floats, value: Floats, learned: Learned
) -> Prefills:
    """`facts`: seconds until arrival, the next and the last due time, and the pace; tokens made, of
    the longest and the mean output, to compute before the next one, and cached.
    """
    arrived_s, next_s, last_s, tbt_s, made, most, mean, tokens, cached = facts
    step_s, prices = learned.step_s, learned.prices
    left = _left(made, most, mean, last_s, step_s)
    least_s = STEP_MARGIN * step_s
    due_s, hope_s, waits = next_s, next_s, np.isinf(next_s)
    if np.count_nonzero(last_s < math.inf):
        # a bound by a TTLT that is absent is inf, and changes nothing
        reserve_s = np.minimum(left.tokens * least_s, RESERVE * (last_s - arrived_s))
        due_s = np.fmin(due_s, last_s - np.maximum(reserve_s, left.mean * least_s))
        hope_s = np.minimum(next_s, last_s - left.mean * step_s)
    if np.count_nonzero(waits):
        due_s = np.where(np.isinf(due_s), arrived_s + FAR_S, due_s)
        hope_s = np.where(np.isinf(hope_s), due_s, hope_s)
        waits &= last_s < math.inf
    return Prefills(
        rows,
        due_s,
        hope_s,
        waits,
        np.minimum(np.minimum(tbt_s, LOOSE_S), left.asked_s),
        tbt_s,
        left.tokens,
        prices.prefill_s(tokens - cached, cached),
        blocks,
        prices.decoding_s(tokens + left.tokens / 2),
        value,
    )


def early(due_s: Floats) -> Floats:
    """The due times of what is more important, so that others give way where a forecast errs."""
    return np.maximum(due_s - EARLY_S, due_s / 2)


class Decodes(NamedTuple):
    """Standard decodes in columns; seconds from now until the next token of each is due."""

    rows: Rows  # of the view
    tbt_s: Floats  # the pace of the SLO
    last_s: Floats  # until the last token is due; inf without a TTLT
    asked_s: Floats  # the pace that a TTLT asks for; inf without one
    pace_s: Floats
    output_tokens: Floats  # the most that are expected still to come
    by_windows: Bools
    even_s: Floats  # if the tokens to come are evenly apart
    until_s: Floats  # how long an iteration may take
    latest_s: Floats  # once, if those after it then come one iteration after the other
    deadline_s: Floats  # by its deadline, where deadlines judge; else as `even_s`

    def taken(self, index: Rows | Bools | slice) -> "Decodes":
        return Decodes._make([column[index] for column in self])

    def spending(self) -> "Decodes":
        """The same, with all of the time that early tokens have earned by their deadlines."""
        return self._replace(
            until_s=np.maximum(self.until_s, self.deadline_s),
            latest_s=np.maximum(self.latest_s, self.deadline_s),
        )


def decodes_of(
    view: View, rows: Rows, learned: Learned, windows: Windows, *, waits: bool
) -> Decodes:
    """[rows] the standard decodes. `waits`: a standard prefill waits."""
    now, step_s, definition = view.start_unix_s, learned.step_s, view.definition[rows]
    made, tbt_s = view.generated_tokens[rows], view.tbt_s[rows]
    application, most = view.application[rows], view.max_tokens[rows]
    upper = np.minimum(learned.upper[application], most)
    mean = np.minimum(learned.mean[application], most)
    last_s, next_s = view.last_due_unix_s[rows] - now, view.next_due_unix_s[rows] - now
    left = _left(made, upper, mean, last_s, step_s)
    by_deadline = ((definition == DEADLINE) | (definition == LAST)) & (next_s < math.inf)
    earns, pace_s = np.count_nonzero(by_deadline), np.minimum(tbt_s, LOOSE_S)
    if earns:  # early tokens make the pace looser
        early_s = np.maximum(next_s - pace_s, 0.0) / left.tokens
        pace_s = np.where(by_deadline, pace_s + early_s, pace_s)
    if np.count_nonzero(left.asked_s < pace_s):
        # a TTLT makes passes take no more than a share of the time, unless the mean output is late
        pass_s = view.profile.batch_s(chunk.decodes_of(view, rows))
        least_s = pass_s / (SHARE if waits else 1.0) + 2 * MARGIN_S
        asked_s = np.maximum(left.asked_s, np.minimum(least_s, last_s / left.mean))
        pace_s = np.minimum(pace_s, asked_s)
    newest_s = view.newest_token_unix_s[rows] - now
    even_s = np.where(newest_s < math.inf, newest_s, 0.0) + pace_s
    of_mean_s = view.first_token_unix_s[rows] - now + made * tbt_s
    paced = of_mean_s < math.inf
    by_windows = (definition == WINDOWS) & paced
    eases = left.asked_s >= tbt_s  # no TTLT asks for more than the pace of the SLO
    if np.count_nonzero(paced):  # so many paces after the first token
        eased = paced & ~by_windows & eases & (definition != GAPS)
        even_s = np.where(eased, np.maximum(even_s, of_mean_s), even_s)
    latest_s = even_s
    deadline_s = np.where(by_deadline & eases, next_s, even_s) if earns else even_s
    some = by_windows.nonzero()[0]
    if len(some):
        own_s, late_s = windows.next_tokens(view, rows[some], np.minimum(step_s, tbt_s[some]))
        latest_s, even_s, deadline_s = even_s.copy(), even_s.copy(), deadline_s.copy()
        own_s = np.where(eases[some], own_s, np.minimum(own_s, even_s[some]))
        latest_s[some] = np.maximum(even_s[some], late_s)
        even_s[some] = deadline_s[some] = own_s
    columns = (rows, tbt_s, last_s, left.asked_s, pace_s, left.tokens, by_windows)
    return Decodes(*columns, even_s, even_s, latest_s, deadline_s)


def as_judged(view: View) -> View:
    """The view without the bounds that count for nothing: where the last token judges a request
    that has a TTLT, its TTFT and its paces.
    """
    free: Bools = (view.definition == LAST) & view.has_ttlt
    if not np.count_nonzero(free):
        return view
    names = ("first_due_unix_s", "next_due_unix_s", "tbt_s", "tightest_tbt_s")
    free_s: dict[str, Any] = {name: np.where(free, np.inf, getattr(view, name)) for name in names}
    return replace(view, **free_s)


def as_offer_judged(offer: Offer) -> Offer:
    """The same for an offer."""
    slo = offer.slo
    if slo.definition is not Definition.TTLT or slo.ttlt_s is None:
        return offer
    whole = Slo(ttlt_s=slo.ttlt_s, definition=slo.definition)
    return structs.replace(offer, slo=whole, next_due_unix_s=math.inf)
