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
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

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
EARNS = np.array([n in (DEADLINE, LAST) for n in range(len(DEFINITIONS))])  # by early tokens

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
    step_s: float  # of an iteration with decodes, lately
    prices: Prices
    scale: float  # of the drafts that are accepted


class Facts(NamedTuple):
    """Facts about requests, in columns; seconds from now, inf for a bound that is absent."""

    arrived_s: Floats
    next_s: Floats  # until the next token is due
    last_s: Floats  # until the last one is
    asked_s: Floats  # the pace that a TTLT asks for
    tbt_s: Floats  # the tightest pace of the SLO
    made: Floats  # tokens
    most: Floats  # tokens of the whole output
    target: Floats  # tokens to compute before the next one
    cached: Floats  # of these, computed
    held: Floats  # blocks of KV
    value: Floats  # importance
    load_s: Floats  # for what comes back from the host's memory
    tokens: Floats  # to come, of the longest output expected
    mean: Floats  # to come, of the mean output

    def taken(self, index: slice) -> "Facts":
        return Facts._make([column[index] for column in self])


# the columns of a view for all facts but the last two; `asked_s` begins as inf without a TTLT
COLUMNS = attrgetter(
    *("arrived_unix_s", "next_due_unix_s", "last_due_unix_s", "last_due_unix_s", "tightest_tbt_s"),
    *("generated_tokens", "max_tokens", "target_tokens", "computed_tokens", "kv_held_blocks"),
    *("importance", "load_s"),
)


def facts_of(view: View, rows: Rows, learned: Learned, offers: Sequence[Offer] = ()) -> Facts:
    """[rows, then offers]"""
    application, lengths, step_s = view.application[rows], learned.lengths, learned.step_s
    columns = [column[rows] for column in COLUMNS(view)]
    columns.append(lengths.upper(view.applications).take(application))
    columns.append(lengths.mean(view.applications).take(application))
    table = np.array(columns)
    if offers:
        table = np.concatenate((table, _offered(offers, lengths)), axis=1)
    table[:4] -= view.start_unix_s
    facts = Facts._make(table)
    last_s, asked_s, tokens, mean = facts.last_s, facts.asked_s, facts.tokens, facts.mean
    np.minimum(table[-2:], facts.most, out=table[-2:])
    table[-2:] -= facts.made
    np.maximum(tokens, np.maximum(facts.made / 2, 1.0), out=tokens)
    np.maximum(mean, 1.0, out=mean)
    if np.count_nonzero(np.isfinite(last_s)):
        likely_s, longest_s = last_s / np.maximum(mean, tokens / 2), last_s / (HASTE * tokens)
        np.minimum(likely_s, np.maximum(longest_s, STEP_MARGIN * step_s), out=asked_s)
        np.maximum(asked_s, 1e-3, out=asked_s)
        # beyond rescue: it keeps its pace, and shortens no iteration
        np.putmask(asked_s, last_s / mean < step_s / STEP_MARGIN, LOOSE_S)
    return facts


def _offered(offers: Sequence[Offer], lengths: OutputLengths) -> Floats:
    """[facts, offers]"""
    names = [offer.application for offer in offers]
    upper, mean = lengths.upper(names), lengths.mean(names)
    facts = []
    for n, offer in enumerate(offers):
        last_unix_s = offer.slo.last_due_unix_s(offer.arrived_unix_s)
        due_unix_s = (offer.arrived_unix_s, offer.next_due_unix_s, last_unix_s, last_unix_s)
        made, pace_s = offer.generated_tokens, offer.slo.tightest_pace_s(offer.thinking)
        tokens = (made, offer.max_tokens, offer.prompt_tokens + made)
        cached = offer.cached_tokens
        more = (cached, 0, offer.importance, offer.load_s, upper[n], mean[n])
        facts.append((*due_unix_s, pace_s, *tokens, *more))
    return np.array(facts).T


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


NONE = Prefills(np.zeros(0, dtype=np.intp), *np.zeros((10, 0)))


def prefills_of(rows: Rows, facts: Facts, learned: Learned, block_tokens: int) -> Prefills:
    """[rows] The prefills behind these facts, whose columns it overwrites."""
    next_s, last_s, tokens, mean = facts.next_s, facts.last_s, facts.tokens, facts.mean
    step_s, prices = learned.step_s, learned.prices
    least_s, target, cached = STEP_MARGIN * step_s, facts.target, facts.cached
    due_s, hope_s, waits, whole = next_s, next_s, np.isinf(next_s), np.isfinite(last_s)
    if np.count_nonzero(whole):
        # a bound by a TTLT that is absent is inf, and changes nothing
        reserve_s = np.minimum(tokens * least_s, RESERVE * (last_s - facts.arrived_s))
        due_s = np.fmin(due_s, last_s - np.maximum(reserve_s, mean * least_s))
        hope_s = np.minimum(next_s, last_s - mean * step_s)
    if np.count_nonzero(waits):
        np.putmask(due_s, np.isinf(due_s), facts.arrived_s + FAR_S)
        np.putmask(hope_s, np.isinf(hope_s), due_s)
        waits &= whole
    due = (rows, due_s, hope_s, waits)
    pace_s = np.minimum(np.minimum(facts.tbt_s, LOOSE_S), facts.asked_s)
    seconds = prices.prefill_s(target - cached, cached) + facts.load_s
    decode_s = prices.decoding_s(target + tokens / 2)
    blocks = np.maximum(np.ceil(target / block_tokens) - facts.held, 0.0)
    return Prefills(*due, pace_s, facts.tbt_s, tokens, seconds, blocks, decode_s, facts.value)


def early(due_s: Floats) -> Floats:
    """The due times of what is more important, so that others give way where a forecast errs."""
    return np.maximum(due_s - EARLY_S, due_s / 2)


class Decodes(NamedTuple):
    """Standard decodes in columns; seconds from now until the next token of each is due."""

    rows: Rows  # of the view
    tbt_s: Floats  # the pace of the SLO
    asked_s: Floats  # the pace that a TTLT asks for; inf without one
    pace_s: Floats
    output_tokens: Floats  # the most that are expected still to come
    fewest_tokens: Floats  # the fewest: as far below the mean as the most are above it
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
    view: View, rows: Rows, facts: Facts, step_s: float, windows: Windows, *, waits: bool
) -> Decodes:
    """[rows] the standard decodes. `waits`: a standard prefill waits."""
    now, definition, tbt_s = view.start_unix_s, view.definition[rows], view.tbt_s[rows]
    next_s, last_s, ttlt_s = facts.next_s, facts.last_s, facts.asked_s
    by_deadline = EARNS.take(definition) & np.isfinite(next_s)
    earns, pace_s = np.count_nonzero(by_deadline), np.minimum(tbt_s, LOOSE_S)
    if earns:  # early tokens make the pace looser
        early_s = np.maximum(next_s - pace_s, 0.0) / facts.tokens
        np.putmask(pace_s, by_deadline, pace_s + early_s)
    if np.count_nonzero(ttlt_s < pace_s):
        # a TTLT makes passes take no more than a share of the time, unless the mean output is late
        pass_s = view.profile.batch_s(chunk.decodes_of(view, rows))
        least_s = pass_s / (SHARE if waits else 1.0) + 2 * MARGIN_S
        asked_s = np.maximum(ttlt_s, np.minimum(least_s, last_s / facts.mean))
        pace_s = np.minimum(pace_s, asked_s)
    newest_s = view.newest_token_unix_s[rows] - now
    np.putmask(newest_s, np.isinf(newest_s), 0.0)
    even_s = newest_s + pace_s
    of_mean_s = view.first_token_unix_s[rows] - now + facts.made * tbt_s
    paced = np.isfinite(of_mean_s)
    by_windows = (definition == WINDOWS) & paced
    eases = ttlt_s >= tbt_s  # no TTLT asks for more than the pace of the SLO
    if np.count_nonzero(paced):  # so many paces after the first token
        eased = paced & ~by_windows & eases & (definition != GAPS)
        np.putmask(even_s, eased, np.maximum(even_s, of_mean_s))
    latest_s = deadline_s = even_s
    if earns:
        deadline_s = even_s.copy()
        np.putmask(deadline_s, by_deadline & eases, next_s)
    some = by_windows.nonzero()[0]
    if len(some):
        own_s, late_s = windows.next_tokens(view, rows[some], np.minimum(step_s, tbt_s[some]))
        latest_s, even_s, deadline_s = even_s.copy(), even_s.copy(), deadline_s.copy()
        own_s = np.where(eases[some], own_s, np.minimum(own_s, even_s[some]))
        latest_s[some] = np.maximum(even_s[some], late_s)
        even_s[some] = deadline_s[some] = own_s
    output = (facts.tokens, 2 * facts.mean - facts.tokens)
    return Decodes(rows, tbt_s, ttlt_s, pace_s, *output, even_s, even_s, latest_s, deadline_s)


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
