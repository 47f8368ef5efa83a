"""Drafts: by need where a pace is too tight for plain decodes, else by what the time is worth.

- *Nothing waits for its prefill*: the depth, and the number of drafts verified, are those with the
  most tokens a second that still keep the pace of every decode.
- *Need*: a TBT is below NEEDED times what a pass of a few decodes takes. Then decodes draft, the
  drafts needed most are verified first, and the iteration lasts as long as that pace allows. The
  time that is left is for prefills; a short one runs at once. While some wait, decodes of a looser
  pace than such iterations have one token in each, and draft nothing.
- *Whole answers*: prompts wait, and some decode has a TTLT that leaves it less than HURRIED passes
  for each token. All decodes draft in half of the time if the prompts with a TTFT are in
  time in the other half, and if none has given way lately or no decode has a pace.
- *Best-effort* requests draft where they are alone on the replica, and none waits for its prefill.
- *Otherwise* prompts wait, and none drafts: the time is theirs.

In no case do decodes draft where that would bring them fewer tokens a second, as far as
iterations have shown (lasting.py).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shared.columns import Ints
from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.seam import (
    DEFINITIONS,
    Bools,
    Choice,
    Drafts,
    Floats,
    Observation,
    Speculation,
    View,
)
from shared.policy.slackline.drafting.lasting import Lasting
from shared.policy.slackline.drafting.yields import DEEPEST, yields
from shared.policy.slackline.due import LOOSE_S, earns
from shared.policy.slackline.iteration import (
    filled,
    longest_without_standard_s,
    with_best_effort,
)
from shared.policy.slackline.price import Prices
from shared.policy.slackline.token_order import MARGIN_S, Timing
from shared.policy.speculation import draft_s
from shared.vocabulary import Definition

_WINDOWS = DEFINITIONS.index(Definition.MAX_TPOT_10)
# Below so many times what a pass of a few decodes takes, a pace leaves prefills little time. Where
# each ten tokens are to keep it, drafts are too uncertain while plain passes can.
NEEDED, NEEDED_BY_WINDOWS = 1.7, 1.3
# Of the drafts accepted in the mean, so much counts where each ten tokens are to keep a pace.
SURE_BY_WINDOWS = 0.5
ACCEPTANCE = 0.7  # of the law, before anything is observed
FADE = 0.02  # weight of one iteration
# Below this share of what the law says, acceptance is low: luck does not bring it there. By one
# iteration without drafts so much of the difference is forgotten.
LOW, FORGOTTEN = 0.75, 0.0005
FEW = 8  # decodes, as an example of what drafts bring
CONTEXT_TOKENS = 256  # of each decode in the plan that others are compared with
# The share of an iteration in which the draft model may read contexts.
READING = 0.1
# The share of an iteration in which decodes draft while prompts wait.
SHARE = 0.5
# A prompt that takes no more than this share of the decodes' time runs beside drafts at once.
AT_ONCE = 0.1
# A whole answer is in a hurry if its TTLT leaves less than so many passes to each token.
HURRIED = 2.0


class Accepted:
    """The drafts that are accepted, relative to what the law says.

    Where few are, nobody drafts, and so nothing would be seen any more. Therefore a low share is
    slowly forgotten while none draft: drafts are tried again, the more rarely the fewer were
    accepted.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._observed = self._low = False

    def begin(self, shares: Sequence[float]) -> None:
        """Begin with the shares by position that were seen on this replica before; no change once
        something was observed.
        """
        if shares and not self._observed:
            self.scale = _within(shares[0] / ACCEPTANCE)
            self._low = self.scale < LOW

    def forget(self, iterations: int) -> None:
        """So many had decodes, none of which drafted."""
        if self._low:
            self.scale += (1 - (1 - FORGOTTEN) ** iterations) * (1.0 - self.scale)

    def observe(self, drafts: Drafts) -> None:
        self._observed = True
        verified, accepted = float(drafts.drafted.mean()), float(drafts.accepted.mean())
        law = min(yields(ACCEPTANCE), key=lambda known: abs(known.verified - verified))
        if law.accepted > 0:
            expected = law.accepted * verified / law.verified
            self.scale += FADE * (_within(accepted / expected) - self.scale)
        self._low = self.scale < LOW


def _within(ratio: float) -> float:
    """No iteration says more."""
    return min(max(ratio, 0.1), 2.0)


class Plan(NamedTuple):
    """The speculation of one iteration."""

    depth: int
    drafts: int  # to be verified
    accepted: float  # of one request, in the mean
    seconds: float  # of the iteration without prefills

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of each request."""
        return (1.0 + self.accepted) / self.seconds


class Learned:
    """The policy's knowledge of drafts: how many are accepted, and how long they take."""

    def __init__(self) -> None:
        self.accepted, self.lasting = Accepted(), Lasting()

    def observe(self, seen: Observation) -> None:
        self.lasting.observe(seen)
        if seen.drafts is not None:
            self.accepted.observe(seen.drafts)
        elif seen.shape.decodes:
            self.accepted.forget(seen.iterations)


class Cases(NamedTuple):
    """Why decodes draft; an ablation leaves one out."""

    need: bool = True  # a pace needs it
    worth: bool = True  # it brings more tokens a second


def drafting(
    view: View,
    timing: Timing,
    every: Decoding,
    order: Rows,
    spare: Bools,
    prices: Prices,
    learned: Learned,
    cases: Cases,
    *,
    calm: bool,
) -> Choice | None:
    """One iteration in which the standard decodes draft, or best-effort ones where they are alone;
    None where none should. `spare`: as in iteration.py. `calm`: no request has given way lately.
    """
    if view.draft is None:
        return None
    rows = every.rows[view.standard[every.rows]]
    if not len(rows):
        return _best_effort_alone(view, timing, every, prices, learned) if cases.worth else None
    shape = chunk.decodes_of(view, rows)
    plain_s = view.profile.batch_s(shape)
    needing = need_drafts(view, view.tbt_s[rows], view.definition[rows] == _WINDOWS)
    tight = rows[needing] if cases.need else rows[:0]
    if not len(tight) and not cases.worth:
        return None
    whole = _for_whole_answers(view, rows)
    if not len(tight) and len(order) and not (whole.all() or (calm and whole.any())):
        return None
    least = _least(view, view.draft, len(rows), plain_s, learned)
    if len(tight):
        best, drafters = best_plan(view, view.draft, shape, shape, learned), rows
        assert best is not None
        tightest_s = float(view.tbt_s[tight].min())
        lasts_s = (1.0 + best.accepted) * tightest_s
        if len(order) and (best.seconds <= lasts_s or best.tokens_per_s > least):
            drafters = rows[view.tbt_s[rows] < max(lasts_s, best.seconds)]
            best = best_plan(view, view.draft, shape, chunk.decodes_of(view, drafters), learned)
            assert best is not None
        if best.tokens_per_s <= least:
            return None
        length_s = (1.0 + float(_sure(view, tight, best).min())) * tightest_s
        length_s = min(length_s, _slack_s(view, timing, rows, drafters, tight, best))
        longer_s = (1.0 + AT_ONCE) * best.seconds + 2 * MARGIN_S
        if length_s < longer_s and _runs_at_once(view, order[:1], prices, AT_ONCE * best.seconds):
            # best-effort requests make no decode late
            length_s, spare = longer_s, np.zeros_like(spare)
        return _choice(
            view, every, rows, drafters, order, spare, prices, best, length_s, tight, least
        )
    due_s, share = timing.token_due_s[rows], 1.0
    if len(order):
        if float(timing.each_s[rows[whole]].min()) > HURRIED * plain_s:
            return None
        due_s, share = due_s[~whole], SHARE
    else:
        due_s = due_s[due_s >= plain_s + MARGIN_S]
    limit_s = float(due_s.min(initial=LOOSE_S)) - MARGIN_S
    best = best_plan(view, view.draft, shape, shape, learned, share * limit_s)
    if best is None or best.tokens_per_s <= least:
        return None
    if len(order):
        limit_s = min(limit_s, best.seconds / SHARE)
        if not _in_time(view, timing, order, prices, limit_s):
            return None
    return _choice(
        view, every, rows, rows, order, spare, prices, best, limit_s + MARGIN_S, tight, least
    )


def _best_effort_alone(
    view: View, timing: Timing, every: Decoding, prices: Prices, learned: Learned
) -> Choice | None:
    """One iteration in which the best-effort decodes draft, since no other request is on the
    replica. It is no longer than one without drafts may be: an arrival need not wait.
    """
    rows, draft = every.rows, view.draft
    assert draft is not None
    if not len(rows) or not view.in_decode.all():
        return None
    shape = chunk.decodes_of(view, rows)
    least = _least(view, draft, len(rows), view.profile.batch_s(shape), learned)
    length_s = longest_without_standard_s(view, timing, rows)
    best = best_plan(view, draft, shape, shape, learned, length_s - MARGIN_S)
    if best is None or best.tokens_per_s <= least:
        return None
    none = rows[:0]
    spare = np.zeros(view.rows, dtype=np.bool_)
    return _choice(view, every, rows, rows, none, spare, prices, best, length_s, none, least)


def _for_whole_answers(view: View, rows: Rows) -> Bools:
    """[rows] those with a TTLT and without a pace."""
    return view.has_ttlt[rows] & np.isinf(view.tbt_s[rows])


def _in_time(view: View, timing: Timing, order: Rows, prices: Prices, iteration_s: float) -> bool:
    """Tells whether the prefills of no whole answer are in time if prefills have all but SHARE of
    the time from now on.
    """
    cached = view.computed_tokens[order]
    work_s = prices.prefill_s(view.target_tokens[order] - cached, cached).cumsum()
    ends_s = work_s / (1 - SHARE) + iteration_s
    urgent = ~view.whole[order]
    return bool((ends_s <= timing.prefill_due_s[order])[urgent].all())


def _runs_at_once(view: View, first: Rows, prices: Prices, most_s: float) -> bool:
    """Tells whether the first prompt is of no whole answer, and what is left of it takes no longer
    than this.
    """
    if not len(first) or view.whole[first[0]]:
        return False
    cached = view.computed_tokens[first]
    left_s = prices.prefill_s(view.target_tokens[first] - cached, cached)
    return float(left_s[0]) <= most_s


def need_drafts(view: View, tbt_s: Floats, windows: Bools) -> Bools:
    """[requests] those with a pace for which plain passes are too slow. `windows`: each ten tokens
    are to keep it.
    """
    if view.draft is None:
        return np.zeros(len(tbt_s), dtype=np.bool_)
    few = BatchShape(decodes=FEW, decode_context=CONTEXT_TOKENS * FEW)
    few_s = view.profile.batch_s(few)
    need: Bools = tbt_s < np.where(windows, NEEDED_BY_WINDOWS, NEEDED) * few_s
    return need


def some_need_drafts(view: View, decodes: Rows) -> bool:
    """Tells whether one of these decodes has such a pace."""
    if view.draft is None:
        return False
    windows = view.definition[decodes] == _WINDOWS
    return bool(need_drafts(view, view.tbt_s[decodes], windows).any())


def speed(view: View, learned: Learned, decodes: int) -> float:
    """The tokens that drafts bring to so many decodes, a few at least, in the time in which each
    would have one.
    """
    if view.draft is None:
        return 1.0
    decodes = max(decodes, FEW)
    shape = BatchShape(decodes=decodes, decode_context=CONTEXT_TOKENS * decodes)
    factor = _factor(view, view.draft, decodes, learned)
    best = best_plan(view, view.draft, shape, shape, learned)
    assert best is not None
    return max(1.0, best.tokens_per_s * view.profile.batch_s(shape) / factor)


def can_pay(view: View, every: Decoding, learned: Learned) -> bool:
    """Tells whether drafts would bring the standard ones of these decodes more tokens a second, or
    all where there are none, with time enough and while nothing waits.
    """
    if view.draft is None or not len(every.rows):
        return False
    standard = every.rows[view.standard[every.rows]]
    rows = standard if len(standard) else every.rows
    shape = chunk.decodes_of(view, rows)
    factor = _factor(view, view.draft, len(rows), learned)
    best = best_plan(view, view.draft, shape, shape, learned)
    return best is not None and best.tokens_per_s * view.profile.batch_s(shape) > factor


def _factor(view: View, draft: Draft, decodes: int, learned: Learned) -> float:
    """By how much drafts make the iteration of so many decodes longer than predicted, beside one
    without. The reference is a draft for each of the most decodes of that size.
    """
    most = (1 << decodes.bit_length()) - 1
    shape = BatchShape(decodes=most, decode_context=CONTEXT_TOKENS * most)
    plain_s = view.profile.batch_s(shape)
    drafting_s = draft.step_s(shape) + view.profile.batch_s(_verifying(shape, most))
    learned.lasting.refer(decodes, drafting_s, plain_s)
    return learned.lasting.factor(decodes)


def _least(view: View, draft: Draft, decodes: int, plain_s: float, learned: Learned) -> float:
    """The predicted tokens a second of each decode that drafts must exceed. `plain_s`: of an
    iteration without.
    """
    factor = _factor(view, draft, decodes, learned)
    return factor * learned.lasting.doubt(decodes) / plain_s


def best_plan(
    view: View,
    draft: Draft,
    shape: BatchShape,
    some: BatchShape,
    learned: Learned,
    limit_s: float = math.inf,
) -> Plan | None:
    """The plan with the most tokens a second for the decodes in `some`, which draft, among those in
    `shape`, no deeper than the engine verifies; None if each takes longer than `limit_s`. Contexts
    that the draft has not read are left out.
    """
    step_s, scale, deepest = draft.step_s(some), learned.accepted.scale, view.deepest
    best, most = None, 0.0  # `most`: tokens a second
    verifies_s = 0.0
    for known in yields(ACCEPTANCE):
        if known.depth > deepest:
            continue
        if known.depth == 1:  # from here on, deeper chains have more drafts
            verifies_s = 0.0
        tokens, drafts_s = 1.0 + known.accepted * scale, known.depth * step_s
        # verifying takes no less than the fewer drafts of the chains before took
        if best is not None and tokens <= most * (drafts_s + verifies_s):
            continue
        drafts = round(known.verified * some.decodes)
        verifies_s = view.profile.batch_s(_verifying(shape, drafts))
        seconds = drafts_s + verifies_s
        if seconds <= limit_s and (best is None or tokens / seconds > most):
            best = Plan(known.depth, drafts, known.accepted * scale, seconds)
            most = best.tokens_per_s
    return best


def _verifying(shape: BatchShape, drafts: int) -> BatchShape:
    """The decodes with so many drafts, spread evenly."""
    each = drafts / shape.decodes
    return BatchShape(
        prefill_tokens=drafts,
        prefill_sq=each * drafts,
        prefill_cross=each * shape.decode_context,
        decodes=shape.decodes,
        decode_context=shape.decode_context,
        drafts=drafts,
    )


def _slack_s(
    view: View, timing: Timing, rows: Rows, drafters: Rows, tight: Rows, plan: Plan
) -> float:
    """Seconds that the iteration may take, so that no decode with a pace is late with the last
    token that it brings: of the `drafters` as many as the plan says in the mean, if the draft model
    has read their contexts or reads those of the `tight` ones now; of the others one. A decode that
    is too far behind for this plan constrains nobody.
    """
    rows = rows[np.isfinite(view.tbt_s[rows])]
    read = _missing(view, rows) <= DEEPEST + 1
    drafts = _among(view, drafters)[rows] & (read | _among(view, tight)[rows])
    brings = np.where(drafts, 1.0 + plan.accepted, 1.0)
    tbt_s = view.tbt_s[rows]
    more_s = (brings - 1.0) * tbt_s
    of_mean_s = view.first_token_unix_s[rows] + view.generated_tokens[rows] * tbt_s + more_s
    slack_s = of_mean_s - view.start_unix_s
    definition, due_unix_s = view.definition[rows], view.next_due_unix_s[rows]
    earned = earns(definition) & np.isfinite(due_unix_s)
    of_deadline_s = due_unix_s + more_s - view.start_unix_s
    slack_s = np.where(earned, np.maximum(slack_s, of_deadline_s), slack_s)
    spread_s = np.where(drafts, 1.0 + _sure(view, rows, plan), 1.0) * timing.token_due_s[rows]
    of_windows_s = np.minimum(spread_s, timing.until_s[rows])
    slack_s = np.where(definition == _WINDOWS, np.minimum(slack_s, of_windows_s), slack_s)
    return float(slack_s[slack_s >= plan.seconds].min(initial=math.inf))


def _sure(view: View, rows: Rows, plan: Plan) -> Floats:
    """[rows] the accepted drafts of an iteration that each of these counts on."""
    windows = view.definition[rows] == _WINDOWS
    return np.where(windows, SURE_BY_WINDOWS * plan.accepted, plan.accepted)


def _among(view: View, rows: Rows) -> Bools:
    """[rows of the view] whether each is among these; np.isin takes ten times as long."""
    among = np.zeros(view.rows, dtype=np.bool_)
    among[rows] = True
    return among


def _missing(view: View, rows: Rows) -> Ints:
    """[rows] positions of each context that are not in the draft model's KV."""
    computed = view.computed_tokens[rows]
    return computed + 1 - np.minimum(view.draft_tokens[rows], computed)


def _read_later(
    draft: Draft, prices: Prices, missing: Ints, needed: Bools, spare_s: float, length_s: float
) -> Bools:
    """[decodes] those whose contexts the draft model does not read now: the shortest are read, as
    many as `spare_s` allows, those of the `needed` first. The others get READING of `length_s`.
    `missing`: positions that are not in its KV.
    """
    read_s = draft.read * prices.prefill_s(missing, np.zeros(len(missing)))
    read_s[missing <= DEEPEST + 1] = 0.0
    order = np.lexsort((read_s, ~needed))
    limit_s = np.where(needed[order], spare_s, min(spare_s, READING * length_s))
    late = np.zeros(len(missing), dtype=np.bool_)
    late[order] = (read_s[order] > 0) & (read_s[order].cumsum() > limit_s)
    return late


def _choice(
    view: View,
    every: Decoding,
    rows: Rows,
    drafters: Rows,
    order: Rows,
    spare: Bools,
    prices: Prices,
    plan: Plan,
    length_s: float,
    tight: Rows,
    least: float,
) -> Choice | None:
    """The iteration with this speculation of the `drafters`, and prefills in the rest of
    `length_s`; None where KV is too short for drafts, or where so few can draft that it brings no
    more than `least` tokens a second of each, and no further context is read for later iterations
    either.
    """
    assert view.draft is not None
    left = view.max_tokens[rows] - view.generated_tokens[rows] - view.unsure_tokens[rows]
    depth: Ints = np.minimum(plan.depth, np.maximum(left - 1, 0)).astype(np.int32)
    computed, missing = view.computed_tokens[rows], _missing(view, rows)
    spare_s = length_s - MARGIN_S - plan.seconds
    needed = _among(view, tight)[rows] | (_for_whole_answers(view, rows) & view.standard[rows])
    depth[_read_later(view.draft, prices, missing, needed, spare_s, length_s)] = 0
    depth[~_among(view, drafters)[rows]] = 0
    drafts = depth > 0
    has = computed + view.unsure_tokens[rows]
    extra = (has + depth) // view.block_tokens - has // view.block_tokens
    free_blocks = every.free_blocks - int(extra.sum())
    if free_blocks < len(every.rows) or not np.count_nonzero(drafts):
        return None
    drafted_s = draft_s(
        view.draft,
        depth=depth[drafts],
        width=np.ones_like(depth[drafts]),
        context=has[drafts] + 1,
        missing=missing[drafts],
        together=view.longest_chain > 0,
    )
    verified = min(plan.drafts, int(depth.sum()))
    shape = _verifying(chunk.decodes_of(view, rows), verified)
    reads = np.count_nonzero(missing[drafts] > DEEPEST + 1)
    if not reads and np.count_nonzero(drafts) < len(drafters):
        tokens = 1.0 + plan.accepted * np.count_nonzero(drafts) / len(drafters)
        if tokens <= least * (drafted_s + view.profile.batch_s(shape)):
            return None
    running = Decoding(rows, every.victims, free_blocks, shape)
    budget_s = length_s - drafted_s - MARGIN_S
    choice = filled(view, running, order, budget_s)
    choice = with_best_effort(view, every, running, order, spare, choice, budget_s)
    n, others = len(rows), len(choice.slots) - len(rows)
    none = np.zeros(others, dtype=np.int32)
    lasts_s = max(length_s if len(order) else 0.0, drafted_s + view.profile.batch_s(shape))
    return replace(
        choice,
        caps=np.concatenate((depth + np.int32(1), choice.caps[n:])),
        speculation=Speculation(
            method="slo_then_throughput",
            depth=np.concatenate((depth, none)),
            width=np.ones(n + others, dtype=np.int32),
            # roots included; those that cannot draft any more have theirs anyway
            budget_tokens=verified + int(np.count_nonzero(drafts)),
            needed_limit_tokens=plan.depth + 1,
            lasts_s=lasts_s,
        ),
    )
