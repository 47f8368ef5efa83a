"""One iteration: the decodes that run beside the prefills that wait, and its end.

- *Length*: until the first token of a decode is due. A decode whose token cannot come in time any
  more constrains nobody, but then the batch takes no longer than the tightest pace, or two passes.
- *Due only*: where not everything fits beside all decodes, those run whose token is due before the
  batch after this one would end, as many as fit; the others too where prefills leave time, since
  they find no KV.
- *Alone*: the prefills due first run without any decode, if the last of them would be late beside
  the decodes and is in time so, and passes after them still keep all due times (token_order.py).
- *In time*: the batch ends where a prefill that it completes is due.
- *Best-effort* requests run only once everything else has fitted, but where they are owed time:
  then they come first, beside the decodes that are due, or alone while no decode is due.
"""

import math

import numpy as np

from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.prefills_alone import whole_prefills
from shared.policy.seam import Bools, Choice, View
from shared.policy.slackline.token_order import MARGIN_S, Timing, TokenOrder, token_order

BATCH_TOKENS = 4096  # the most prompt tokens of an iteration
# An iteration in which best-effort requests come first lasts so many passes of all decodes at most.
PASSES = 1.5
# Of the prefills due first so many are looked at one by one.
FIRST = 12
# With a draft model each decode has so many blocks left for drafts, beside the one to grow by.
DRAFT_BLOCKS = 2


def iteration(view: View, timing: Timing, every: Decoding, order: Rows, spare: Bools) -> Choice:
    """The choice for these decodes, and for the standard prefills in `order`. `spare`: [rows] the
    best-effort requests that run in the time which is left.
    """
    standard = every.rows[view.standard[every.rows]]
    tokens = token_order(view, timing, standard)
    longest_s = _longest_s(view, timing, tokens, order)
    budget_s = longest_s - MARGIN_S
    if len(order):
        if len(standard) and tokens.all_kept:
            first = order[:FIRST]
            # they must end a margin before they are due
            until_s = timing.prefill_due_s[first] - MARGIN_S
            without = whole_prefills(view, every, every.shape, first, until_s, tokens.latest_s)
            if without is not None:
                return without
        running = _running(view, every, standard)
        left = int((view.target_tokens[order] - view.computed_tokens[order]).sum())
        if not _all_fit(view, running, order, left, budget_s):
            running = _running(view, every, tokens.running(longest_s))
        budget_s = _until_due(view, timing, running, order, budget_s)
    else:
        running = _running(view, every, standard)
        if tokens.kept and view.profile.batch_s(running.shape) > budget_s:
            running = _running(view, every, tokens.running(longest_s))
        # best-effort requests spend no time that is left until a deadline
        budget_s = min(budget_s, tokens.paced_s - MARGIN_S)
    choice = filled(view, running, order, budget_s)
    if len(order) and len(running.rows) < len(standard):
        running, choice = _with_the_rest(view, running, tokens, order, choice, budget_s)
    return with_best_effort(view, every, running, order, spare, choice, budget_s)


def filled(view: View, running: Decoding, order: Rows, budget_s: float) -> Choice:
    """These decodes, and prefills in this order."""
    return chunk.fill(
        view,
        running,
        order,
        limit_tokens=BATCH_TOKENS,
        budget_s=budget_s,
        passed=may_be_passed(view),
        kept_blocks=kept_for_drafts(view),
    )


def kept_for_drafts(view: View) -> int:
    """The KV blocks that prefills which begin leave to the drafts of the standard decodes."""
    if view.draft is None:
        return 0
    return DRAFT_BLOCKS * int(np.count_nonzero(view.in_decode & view.standard))


def may_be_passed(view: View) -> Bools:
    """[rows] the requests that others may pass where they find no KV: the standard ones with a TTFT
    alone, which wait no longer than until they are due.
    """
    dated = np.isfinite(view.next_due_unix_s)
    passed: Bools = dated & view.standard
    return passed


def _with_the_rest(
    view: View,
    running: Decoding,
    tokens: TokenOrder,
    order: Rows,
    choice: Choice,
    budget_s: float,
) -> tuple[Decoding, Choice]:
    """The choice with as many of the decodes that sit out as fit in the time that prefills leave:
    they may find no KV, and each token brings the end of a decode nearer, which gives some back.
    """
    shape = chunk.shape_of(view, running, choice)
    if view.profile.batch_s(shape.with_decodes(1, 0)) > budget_s:
        return running, choice  # mostly prefills leave no time
    rests = np.ones(view.rows, dtype=np.bool_)
    rests[running.rows] = False
    rest = tokens.rows[rests[tokens.rows]]
    if not len(chunk.as_many_as_fit(view, shape, rest[:1], budget_s, at_least=0)):
        return running, choice
    more = _beside(view, running, rest, shape, budget_s, at_least=0)
    return more, filled(view, more, order, budget_s)


def best_effort_first(view: View, timing: Timing, every: Decoding, order: Rows) -> Choice | None:
    """The choice in which best-effort requests come first, in the order of arrival, and the
    standard prefills in `order` after them. No decode is late for it, and it is short: a prefill
    may come that is due soon. None: there is no time for any of them, or no KV.
    """
    tokens = token_order(view, timing, every.rows[view.standard[every.rows]])
    longest_s = _longest_s(view, timing, tokens, order)
    if len(tokens.rows):
        longest_s = min(longest_s, PASSES * tokens.every_s)
    budget_s = longest_s - MARGIN_S
    running = _running(view, every, tokens.running(longest_s))
    oldest = every.rows[view.best_effort[every.rows]]
    oldest = oldest[np.lexsort((view.slot[oldest], view.arrived_unix_s[oldest]))]
    both = _beside(view, running, oldest, running.shape, budget_s, at_least=1)
    waiting = _waiting(view, every, view.best_effort)
    waiting = waiting[np.lexsort((view.slot[waiting], view.arrived_unix_s[waiting]))]
    queue = np.concatenate((waiting, order))
    choice = filled(view, both, queue, budget_s)
    if has_best_effort(view, choice):
        return choice
    if not len(tokens.rows) or not tokens.all_kept:
        return None
    none = _running(view, every, every.rows[:0])
    until_s = tokens.latest_s
    choice = filled(view, none, waiting, until_s)
    return choice if has_best_effort(view, choice) else None


def has_best_effort(view: View, choice: Choice) -> bool:
    """Some best-effort request runs in it."""
    return not set(view.slot[view.best_effort].tolist()).isdisjoint(choice.slots.tolist())


def _longest_s(view: View, timing: Timing, tokens: TokenOrder, order: Rows) -> float:
    """The seconds that an iteration may take. `tokens`: of the standard decodes."""
    if len(tokens.rows):
        longest_s = tokens.first_due_s
        if tokens.all_kept:
            return longest_s
        return min(longest_s, max(2 * tokens.every_s, float(timing.pace_s[tokens.rows].min())))
    return longest_without_standard_s(view, timing, order if len(order) else slice(None))


def longest_without_standard_s(view: View, timing: Timing, paced: Rows | slice) -> float:
    """The seconds that an iteration without any standard decode may take: no more than the pace of
    these requests, so that an arrival need not wait; but something must fit.
    """
    one_s = view.profile.batch_s(BatchShape(decodes=1))
    return max(float(timing.pace_s[paced].min(initial=math.inf)), 2 * one_s)


def _running(view: View, every: Decoding, rows: Rows) -> Decoding:
    """These decodes alone. KV stays free for those that sit out to grow by a block."""
    if len(rows) == len(every.rows):
        return every
    shape = chunk.decodes_of(view, rows)
    return every._replace(
        rows=rows, shape=shape, free_blocks=every.free_blocks - (len(every.rows) - len(rows))
    )


def _all_fit(view: View, running: Decoding, order: Rows, left: int, budget_s: float) -> bool:
    if left > BATCH_TOKENS:
        return False
    shape = running.shape
    for row in order.tolist():
        cached = int(view.computed_tokens[row])
        shape = shape.with_chunk(int(view.target_tokens[row]) - cached, cached)
    return view.profile.batch_s(shape) <= budget_s


def _until_due(
    view: View, timing: Timing, running: Decoding, order: Rows, budget_s: float
) -> float:
    """Seconds until the first prefill is due that the batch would complete after that."""
    shape = running.shape
    for row in order[:FIRST].tolist():
        cached = int(view.computed_tokens[row])
        shape = shape.with_chunk(int(view.target_tokens[row]) - cached, cached)
        ends_s, until_s = view.profile.batch_s(shape), float(timing.prefill_due_s[row])
        if ends_s > budget_s:
            break
        if ends_s + MARGIN_S <= until_s < budget_s:
            return until_s - MARGIN_S
    return budget_s


def with_best_effort(
    view: View,
    every: Decoding,
    running: Decoding,
    order: Rows,
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
    left = int((view.target_tokens[order] - view.computed_tokens[order]).sum())
    if left > shape.prefill_tokens - running.shape.prefill_tokens:
        return choice
    others = _by_importance(view, every.rows[runs[every.rows]])
    both = _beside(view, running, others, shape, budget_s, at_least=0 if len(choice.slots) else 1)
    queue = _waiting(view, every, runs)
    if len(both.rows) == len(running.rows) and not len(queue):
        return choice
    return filled(view, both, np.concatenate((order, queue)), budget_s)


def _beside(
    view: View,
    running: Decoding,
    others: Rows,
    batch: BatchShape,
    budget_s: float,
    *,
    at_least: int,
) -> Decoding:
    """The running decodes, and as many of the `others` as fit beside this batch, in their order."""
    others = chunk.as_many_as_fit(view, batch, others, budget_s, at_least=at_least)
    more = chunk.decodes_of(view, others)
    shape = running.shape.with_decodes(more.decodes, more.decode_context)
    return running._replace(rows=np.concatenate((running.rows, others)), shape=shape)


def _waiting(view: View, every: Decoding, some: Bools) -> Rows:
    """The prefills among these requests, the most important first."""
    waiting = ~view.in_decode & some
    waiting[every.victims] = False
    return _by_importance(view, waiting.nonzero()[0])


def _by_importance(view: View, rows: Rows) -> Rows:
    return rows[np.lexsort((view.slot[rows], view.arrived_unix_s[rows], -view.importance[rows]))]
