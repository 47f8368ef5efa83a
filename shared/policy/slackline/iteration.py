"""Composes one iteration: how long it lasts, and which prefills and decodes run in it.

- It lasts until the first token of a decode is due.
- It ends where a prefill that it completes is due.
- The prefills due first run alone, if that saves one of them and every token is in time after it.
- Where not all fits, decodes whose token is not due before the next iteration ends sit out.
- Best-effort requests run in the time that is left, or first where their share is owed.
"""

from functools import cached_property
from operator import mul

import numpy as np

from shared.columns import least
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.prefills_alone import whole_prefills
from shared.policy.seam import Bools, Choice, Floats, View
from shared.policy.slackline.bounds import LOOSE_S, MARGIN_S, Decodes, Prefills
from shared.policy.slackline.give_way import BATCH_TOKENS

FIRST = 12  # of the prefills due first so many are looked at one by one
DRAFT_BLOCKS = 2  # with a draft model, prefills that begin leave each decode so many blocks


class Order:
    """Standard decodes in the order in which their tokens are due."""

    def __init__(self, view: View, decodes: Decodes, every: Decoding) -> None:
        self.view, self.decodes, self.every = view, decodes, every
        self.all = only(view, every, decodes.rows)
        self.pace_s = least(decodes.pace_s)
        self.all_s = view.profile.batch_s(self.all.shape)  # a pass of all
        self.every_s = self.all_s + MARGIN_S
        self.earliest_s = least(decodes.until_s)
        self.all_kept = self.earliest_s >= self.every_s - 1e-9

    @cached_property
    def _sorted(self) -> Decodes:
        return self.decodes.taken(self.decodes.until_s.argsort(kind="stable"))

    @cached_property
    def _pass_s(self) -> Floats:
        """[decodes + 1] a pass of none, and of all up to each."""
        batch_s, rows = self.view.profile.batch_s, self._sorted.rows
        context = np.concatenate((np.zeros(1), self.view.top_tokens[rows].cumsum()))
        count, last, every_s = len(rows), int(context[-1]), self.every_s - MARGIN_S
        one_s = every_s - batch_s(BatchShape(decodes=1, decode_context=last))
        token_s = (every_s - batch_s(BatchShape(decodes=count))) / max(last, 1)
        fewer = np.arange(count, -1, -1) / max(count - 1, 1)
        passes: Floats = every_s - one_s * fewer - token_s * (last - context)
        return passes

    @property
    def longest_s(self) -> float:
        """Seconds that an iteration may take. A token that is late anyway constrains none, but then
        the iteration is no longer than the tightest pace, or two passes.
        """
        if self.all_kept:
            return self.earliest_s
        until_s = self._sorted.until_s
        kept = until_s >= self._pass_s[1:] + MARGIN_S - 1e-9
        first_s = least(until_s[kept])
        return first_s if kept.all() else min(first_s, max(2 * self.every_s, self.pace_s))

    @cached_property
    def alone_s(self) -> float:
        """Seconds that prefills may take without any decode, if passes come after."""
        begin_s = np.sort(self._sorted.latest_s)
        until_s = np.maximum(begin_s[0], begin_s - self._pass_s[0])
        return least(until_s - self._pass_s[1:]) - MARGIN_S

    def running(self, longest_s: float) -> Rows:
        """Those due before the iteration after one of this length would end, as many as fit."""
        if self.all_kept:
            return self.decodes.rows[self.decodes.even_s < 2 * longest_s - 1e-9]
        fits = self._pass_s[1:] <= longest_s - MARGIN_S + 1e-9
        due = self._sorted.even_s < 2 * longest_s - 1e-9
        return self._sorted.rows[due & (fits | (self._sorted.until_s <= longest_s + 1e-9))]


def iteration(order: Order, queue: Prefills, spare: Bools) -> Choice:
    """The choice for the decodes, and the standard prefills in `queue`. `spare`: [rows] the
    best-effort requests that run in the time which is left.
    """
    view, every = order.view, order.every
    standard, longest_s, running = order.decodes.rows, order.longest_s, order.all
    if not len(standard):
        # no standard decode: no longer than a pace, so that an arrival need not wait
        longest_s = _unpaced_s(view, queue.pace_s)
    budget_s = longest_s - MARGIN_S
    if len(queue.rows):
        first, due_s = queue.rows[:FIRST], queue.due_s[:FIRST] - MARGIN_S
        whole = _whole(view, running, first)
        whole_s = view.profile.batch_s(whole) + float(view.load_s[first].sum())
        if len(standard) and order.all_kept and whole_s > least(due_s):  # some may be late
            alone = whole_prefills(view, every, running.shape, first, due_s, order.alone_s)
            if alone is not None:
                return alone
        fits = whole.prefill_tokens <= BATCH_TOKENS and whole_s <= budget_s
        if not fits or not _all_fit(view, running, queue.rows, budget_s):
            running = only(view, every, order.running(longest_s))
        budget_s = _until_due(view, running, first, due_s, budget_s)
    elif len(standard) and view.profile.batch_s(running.shape) > budget_s:
        running = only(view, every, order.running(longest_s))
    choice = filled(view, running, queue.rows, budget_s)
    return with_best_effort(view, every, running, queue.rows, spare, choice, budget_s)


def _unpaced_s(view: View, paces_s: Floats) -> float:
    """Seconds of an iteration without standard decodes: a pace, and no less than two passes."""
    paces_s = paces_s if len(paces_s) else view.tightest_tbt_s
    least_s = 2 * view.profile.batch_s(BatchShape(decodes=1))
    return max(min(least(paces_s), LOOSE_S), least_s)


def filled(view: View, running: Decoding, queue: Rows, budget_s: float) -> Choice:
    """These decodes, and prefills in this order. Those with a TTFT that find no KV let others by:
    they wait no longer than until they are due.
    """
    if not len(queue):
        return chunk.fill(view, running, queue, limit_tokens=0)
    return chunk.fill(
        view,
        running,
        queue,
        limit_tokens=BATCH_TOKENS,
        budget_s=budget_s,
        passed=may_be_passed(view),
        kept_blocks=kept_for_drafts(view),
    )


def may_be_passed(view: View) -> Bools:
    return np.isfinite(view.next_due_unix_s) & view.standard


def kept_for_drafts(view: View) -> int:
    """The KV blocks that prefills which begin leave to the drafts of the standard decodes."""
    if view.draft is None:
        return 0
    return DRAFT_BLOCKS * int(np.count_nonzero(view.in_decode & view.standard))


def stuck(view: View, every: Decoding, queue: Prefills) -> bool:
    """True if none of these prefills finds KV."""
    kept = kept_for_drafts(view)
    if float(queue.blocks.sum()) <= every.free_blocks - len(every.rows) - kept:
        return False
    return chunk.none_finds_kv(view, every, queue.rows, may_be_passed(view), kept_blocks=kept)


def only(view: View, every: Decoding, rows: Rows) -> Decoding:
    """These decodes alone. KV stays free for the others to grow by a block."""
    if len(rows) == len(every.rows):
        return every
    free_blocks = every.free_blocks - (len(every.rows) - len(rows))
    return every._replace(rows=rows, shape=chunk.decodes_of(view, rows), free_blocks=free_blocks)


def _whole(view: View, running: Decoding, queue: Rows) -> BatchShape:
    """The decodes, and these prefills to their ends."""
    computed, shape = view.computed_tokens[queue], running.shape
    left, cached = (view.target_tokens[queue] - computed).tolist(), computed.tolist()
    return BatchShape(
        sum(left),
        len(left),
        float(sum(map(mul, left, left))),
        float(sum(map(mul, left, cached))),
        sum(cached),
        shape.decodes,
        shape.decode_context,
    )


def _all_fit(view: View, running: Decoding, queue: Rows, budget_s: float) -> bool:
    """True if the prefills beyond those due first fit as well."""
    if len(queue) <= FIRST:
        return True
    left = view.target_tokens[queue] - view.computed_tokens[queue]
    if int(left.sum()) > BATCH_TOKENS:
        return False
    load_s = float(view.load_s[queue].sum())
    return view.profile.batch_s(_whole(view, running, queue)) + load_s <= budget_s


def _until_due(view: View, running: Decoding, first: Rows, due_s: Floats, budget_s: float) -> float:
    """Seconds until the first prefill is due that the batch would complete after that."""
    if least(due_s) >= budget_s:
        return budget_s
    shape, loads_s = running.shape, view.load_s[first].cumsum()
    columns = (view.target_tokens[first], view.computed_tokens[first], loads_s, due_s)
    each = zip(*(column.tolist() for column in columns), strict=True)
    for target, cached, load_s, until_s in each:
        shape = shape.with_chunk(target - cached, cached)
        ends_s = view.profile.batch_s(shape) + load_s
        if ends_s > budget_s:
            break
        if ends_s <= until_s < budget_s:
            return float(until_s)
    return budget_s


def with_best_effort(
    view: View,
    every: Decoding,
    running: Decoding,
    queue: Rows,
    spare: Bools,
    choice: Choice,
    budget_s: float,
) -> Choice:
    """The choice with best-effort requests in what time is left, if all standard ones fitted: those
    in `spare`, and any if no standard one runs. Its first entries stay those of `running`.
    """
    runs = spare if len(choice.slots) else view.best_effort
    if not np.count_nonzero(runs):
        return choice
    shape = chunk.shape_of(view, running, choice)
    left = int((view.target_tokens[queue] - view.computed_tokens[queue]).sum())
    if left > shape.prefill_tokens - running.shape.prefill_tokens:
        return choice
    rows, waiting = (by_importance(view, some) for some in _among(view, every, runs))
    both = _beside(view, running, rows, shape, budget_s, at_least=int(not len(choice.slots)))
    if len(both.rows) == len(running.rows) and not len(waiting):
        return choice
    return filled(view, both, np.concatenate((queue, waiting)), budget_s)


def best_effort_first(order: Order, queue: Rows) -> Choice | None:
    """An iteration in which best-effort requests come before standard prefills, the oldest first:
    beside the decodes that are due, or alone; None where none of them can run.
    """
    view, every, longest_s = order.view, order.every, order.longest_s
    if len(order.decodes.rows):
        longest_s = min(longest_s, 2 * order.every_s)
        running = only(view, every, order.running(longest_s))
    else:
        longest_s = _unpaced_s(view, view.tightest_tbt_s)
        running = order.all
    budget_s = longest_s - MARGIN_S
    rows, waiting = (
        some[np.lexsort((view.slot[some], view.arrived_unix_s[some]))]
        for some in _among(view, every, view.best_effort)
    )
    both = _beside(view, running, rows, running.shape, budget_s, at_least=1)
    choice = filled(view, both, np.concatenate((waiting, queue)), budget_s)
    if not has_best_effort(view, choice) and len(order.decodes.rows) and order.all_kept:
        choice = filled(view, only(view, every, every.rows[:0]), waiting, order.alone_s)
    return choice if has_best_effort(view, choice) else None


def has_best_effort(view: View, choice: Choice) -> bool:
    return not set(view.slot[view.best_effort].tolist()).isdisjoint(choice.slots.tolist())


def _among(view: View, every: Decoding, some: Bools) -> tuple[Rows, Rows]:
    """The decodes and the prefills among these requests."""
    waiting = ~view.in_decode & some
    waiting[every.victims] = False
    return every.rows[some[every.rows]], waiting.nonzero()[0]


def _beside(
    view: View, running: Decoding, rows: Rows, batch: BatchShape, budget_s: float, *, at_least: int
) -> Decoding:
    """The running decodes, and as many of these as fit beside this batch, in their order."""
    rows = chunk.as_many_as_fit(view, batch, rows, budget_s, at_least=at_least)
    more = chunk.decodes_of(view, rows)
    shape = running.shape.with_decodes(more.decodes, more.decode_context)
    return running._replace(rows=np.concatenate((running.rows, rows)), shape=shape)


def by_importance(view: View, rows: Rows) -> Rows:
    return rows[np.lexsort((view.slot[rows], view.arrived_unix_s[rows], -view.importance[rows]))]
