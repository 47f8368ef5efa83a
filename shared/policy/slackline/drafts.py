"""Speculation of the policy slackline: whether decodes draft, which ones, how deep, and the
iteration in which they do (`drafting`). They draft as much as brings most tokens a second, where a
pace needs drafts or no prefill waits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shared.columns import Ints, least
from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.draft_yields import ACCEPTANCE, DEEPEST, accepted_share, yields
from shared.policy.seam import Bools, Choice, Drafts, Floats, Observation, Speculation, View
from shared.policy.slackline.bounds import GAPS, LOOSE_S, MARGIN_S, WINDOWS, Decodes
from shared.policy.slackline.iteration import Order, filled, with_best_effort
from shared.policy.slackline.prices import ONE, Prices
from shared.policy.slackline.windows import TEN
from shared.policy.speculation import draft_rows_s, lacking

NEEDED = 2.0  # below so many times a pass of one decode a pace needs drafts
SURE = 0.5  # of the drafts accepted on average count in a window of ten: bad luck may fill one
FADE = 0.02  # weight of one iteration
FORGOTTEN = 0.0005  # of what was learned, in an iteration without drafts: they come back
PART = 0.1  # of an iteration: the least for prompts beside needed drafts, the most for contexts


class Accepted:
    """The drafts that are accepted, relative to the formula of draft_yields.py."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._seen = False

    def begin(self, shares: Sequence[float]) -> None:
        """Begin with the shares by position that were seen on this replica before."""
        if shares and not self._seen:
            self.scale = _within(shares[0] / ACCEPTANCE)

    def observe(self, seen: Observation) -> None:
        if seen.drafts is not None:
            self._learn(seen.drafts)
        elif seen.shape.decodes:
            self.scale += (1 - (1 - FORGOTTEN) ** seen.iterations) * (1.0 - self.scale)

    def _learn(self, drafts: Drafts) -> None:
        self._seen = True
        count = len(drafts.drafted)
        verified, accepted = int(drafts.drafted.sum()) / count, int(drafts.accepted.sum()) / count
        expected = verified * accepted_share(verified)
        if expected > 0:
            self.scale += FADE * (_within(accepted / expected) - self.scale)


def _within(ratio: float) -> float:
    return min(max(ratio, 0.1), 2.0)


class Plan(NamedTuple):
    """The speculation of one iteration."""

    depth: int
    drafts: int  # to be verified
    accepted: float  # of one request, on average
    seconds: float  # of the iteration without prefills

    @property
    def tokens_per_s(self) -> float:
        return (1.0 + self.accepted) / self.seconds


def best_plan(
    view: View, draft: Draft, shape: BatchShape, some: BatchShape, scale: float, limit_s: float
) -> Plan | None:
    """The plan with the most tokens a second for the decodes in `some`, among those in `shape`,
    that takes no longer than `limit_s`.
    """
    step_s, plain_s = draft.step_s(some), view.profile.batch_s(shape)
    best, most = None, 0.0
    for known in reversed(yields()):  # the best are among the last
        tokens, drafts_s = 1.0 + known.accepted * scale, known.depth * step_s
        # to verify drafts takes no less than to have none
        if known.depth > view.deepest or tokens <= most * (drafts_s + plain_s):
            continue
        drafts = round(known.verified * some.decodes)
        seconds = drafts_s + view.profile.batch_s(_verifying(shape, drafts))
        if seconds <= limit_s and tokens / seconds > most:
            best = Plan(known.depth, drafts, known.accepted * scale, seconds)
            most = best.tokens_per_s
    return best


def _verifying(shape: BatchShape, drafts: int) -> BatchShape:
    """The decodes with so many drafts, spread evenly."""
    decodes, context, each = shape.decodes, shape.decode_context, drafts / shape.decodes
    return BatchShape(drafts, 0, each * drafts, each * context, 0, decodes, context, drafts)


def needing(view: View, pace_s: Floats) -> Bools:
    """[paces] those for which plain passes are too slow."""
    one_s = view.profile.batch_s(ONE) if view.draft is not None else 0.0
    needs: Bools = pace_s < NEEDED * one_s
    return needs


def speed(view: View, pace_s: Floats, scale: float, decodes: int) -> float:
    """The tokens that drafts bring to so many decodes in the time in which each would have one, if
    one of these paces needs drafts.
    """
    if view.draft is None or not np.count_nonzero(needing(view, pace_s)):
        return 1.0
    shape = BatchShape(decodes=max(decodes, 1))
    best = best_plan(view, view.draft, shape, shape, scale, math.inf)
    return max(1.0, best.tokens_per_s * view.profile.batch_s(shape)) if best else 1.0


def drafting(
    order: Order, queue: Rows, spare: Bools, prices: Prices, scale: float, *, calm: bool
) -> Choice | None:
    """The iteration in which decodes draft; None: they better do not."""
    view, decodes = order.view, order.decodes
    draft, rows = view.draft, decodes.rows
    if draft is None or not len(rows):
        return None
    shape, plain = order.all.shape, 1.0 / order.all_s
    needs = needing(view, decodes.tbt_s)
    whole, windows = np.isinf(decodes.tbt_s), view.definition[rows] == WINDOWS
    # while requests give way, no prompt with a TTFT waits longer for the sake of a TTLT
    if calm or whole.all() or view.whole[queue].all():
        needs |= whole & (plain * decodes.asked_s < NEEDED)
    tight = needs.nonzero()[0]
    if len(queue) and not len(tight):
        return None
    drafts = np.ones(len(rows), dtype=np.bool_)
    if len(tight):  # luck does not even out over an output that may end soon
        brief = calm & ~(whole | windows) & (decodes.fewest_tokens < TEN)
        due_s = np.maximum(decodes.even_s, decodes.deadline_s)
        limit_s = least(due_s[brief & (due_s >= 1.0 / plain)]) - MARGIN_S
    else:
        due_s = decodes.even_s[decodes.even_s >= 1.0 / plain + MARGIN_S]
        limit_s = min(least(due_s), LOOSE_S) - MARGIN_S
    best = best_plan(view, draft, shape, shape, scale, limit_s)
    if best is None or best.tokens_per_s <= plain:
        return None
    length_s = limit_s + MARGIN_S
    if len(tight):
        # by need: the pace of the SLO, and what a TTLT asks for
        pace_s = np.where(whole, decodes.asked_s, decodes.tbt_s)
        tightest_s = least(pace_s[tight])
        lasts_s = (1.0 + best.accepted) * tightest_s
        if len(queue):  # a verified draft costs as much as a token of a prompt
            drafts = (pace_s < max(lasts_s, best.seconds)) & (needs | (_unread(view, rows) == 0))
            some = chunk.decodes_of(view, rows[drafts])
            best = best_plan(view, draft, shape, some, scale, limit_s)
            if best is None or best.tokens_per_s <= plain:
                return None
        sure = (SURE if windows[tight].any() else 1.0) * best.accepted
        until_s = _until_s(view, decodes, windows, drafts, best)
        length_s = min(until_s, (1.0 + sure) * tightest_s, limit_s + MARGIN_S)
        if len(queue):  # some of a prompt runs in any case: its work would be the same later
            part_s = (1.0 + PART) * best.seconds + 2 * MARGIN_S
            length_s = max(length_s, min(part_s, limit_s + MARGIN_S))
    return _choice(order, drafts, needs | whole, queue, spare, prices, best, length_s)


def _unread(view: View, rows: Rows) -> Ints:
    """[rows] tokens of each context that the draft model must read before it drafts; 0: a few."""
    missing = lacking(view, rows)
    return np.where(missing > DEEPEST + 1, missing, 0)


def _until_s(view: View, decodes: Decodes, windows: Bools, drafts: Bools, plan: Plan) -> float:
    """Seconds until the last token that the iteration brings to some decode with a pace is due. One
    that is too far behind constrains none.
    """
    rows, paced = decodes.rows, np.isfinite(decodes.tbt_s)
    more = np.where(drafts, plan.accepted * np.where(windows, SURE, 1.0), 0.0)
    # by the mean, also for those that are behind it; by a deadline that is later
    tbt_s = np.where(paced, decodes.tbt_s, 0.0)
    first_s = view.first_token_unix_s[rows] - view.start_unix_s
    of_mean_s = first_s + view.generated_tokens[rows] * tbt_s
    every_gap = view.definition[rows] == GAPS  # drafts come with a token, and save no gap
    of_mean_s = np.where(every_gap, decodes.even_s - more * tbt_s, of_mean_s)
    of_mean_s = np.where(decodes.deadline_s > decodes.even_s, decodes.deadline_s, of_mean_s)
    of_windows_s = np.minimum((1.0 + more) * decodes.even_s, decodes.latest_s)
    until_s = np.where(windows, of_windows_s, of_mean_s + more * tbt_s)
    return least(until_s[paced & (until_s >= plan.seconds)])


def _choice(
    order: Order,
    drafts: Bools,
    needed: Bools,
    queue: Rows,
    spare: Bools,
    prices: Prices,
    plan: Plan,
    length_s: float,
) -> Choice | None:
    """The iteration with this speculation of the decodes in `drafts`, and prefills in the rest of
    `length_s`; None where KV is too short for drafts, or no context has been read.
    """
    view, every, decodes = order.view, order.every, order.decodes
    assert view.draft is not None
    rows = decodes.rows
    computed, unsure = view.computed_tokens[rows], view.unsure_tokens[rows]
    left = view.max_tokens[rows] - view.generated_tokens[rows] - unsure
    depth = np.minimum(plan.depth, np.maximum(left - 1, 0)).astype(np.int32)
    # contexts are read the shortest first, those of the tight ones before others
    unread = _unread(view, rows)
    if np.count_nonzero(unread):
        read_s = view.draft.read * prices.prefill_s(unread, np.zeros(len(unread)))
        first = np.lexsort((read_s, ~needed))
        spare_s = length_s - MARGIN_S - plan.seconds
        limit_s = np.where(needed[first], spare_s, min(spare_s, PART * length_s))
        depth[first[(read_s[first] > 0) & (read_s[first].cumsum() > limit_s)]] = 0
    depth[~drafts] = 0
    drafts = depth > 0
    reads = np.count_nonzero(unread[drafts]) > 0
    has = computed + unsure
    extra = (has + depth) // view.block_tokens - has // view.block_tokens
    free_blocks = every.free_blocks - int(extra.sum())
    if free_blocks < len(every.rows) or not np.count_nonzero(drafts):
        return None
    drafted_s = draft_rows_s(view, rows, depth, np.ones_like(depth))
    verified = min(plan.drafts, int(depth.sum()))
    shape = _verifying(order.all.shape, verified)
    running = Decoding(rows, every.victims, free_blocks, shape)
    budget_s = length_s - drafted_s - MARGIN_S
    choice = filled(view, running, queue, budget_s)
    choice = with_best_effort(view, every, running, queue, spare, choice, budget_s)
    none = np.zeros(len(choice.slots) - len(rows), dtype=np.int32)
    caps = np.concatenate((depth + np.int32(1), choice.caps[len(rows) :]))
    lasts_s = drafted_s + view.profile.batch_s(shape)
    # alone, drafts stay right until a token may be due; a context is read only once
    until_s = least(np.maximum(decodes.until_s, decodes.deadline_s))
    repeats = 1 if reads or len(queue) else max(1, int(until_s / lasts_s))
    speculation = Speculation(
        method="slo_then_throughput",
        depth=np.concatenate((depth, none)),
        width=np.ones(len(caps), dtype=np.int32),
        # roots included; those that cannot draft any more have theirs anyway
        budget_tokens=verified + int(np.count_nonzero(drafts)),
        needed_limit_tokens=plan.depth + 1,
        lasts_s=max(length_s if len(queue) else 0.0, lasts_s),
    )
    return Choice(choice.slots, caps, choice.preempt, speculation=speculation, repeats=repeats)
