"""Batches: SLOs-Serve's Algorithm 2 with dynamic sizes (section 3.2.2).

A batch may take as long as the tightest TPOT among the standard decodes. It holds the
decodes that are due, then prefills by earliest deadline as far as the time goes. Best-effort
requests get what standard ones leave (best_effort.py).

Where we differ:
- *The loop condition* is misprinted (`>=`). A decode runs if its token is due before the next batch
  would end. Tokens leave at a batch's end, so with "due when this one begins" they come late by up
  to a batch.
- *Nothing to prefill*: all decodes run, since no other request wants their time.
- *A deadline inside the batch*: the batch ends there, if what is due fits. Batches of full length
  would miss it although there is time.
- *Equal deadlines*: the request that arrived first goes first.
- *No decodes*: a batch is no longer than the tightest TPOT of the requests to prefill, so that an
  arrival waits no longer than otherwise.
- *The decodes alone take too long*: they run and nothing is prefilled beside them. Admission
  prevents that as far as lengths are known.
- KV is claimed by the rules of shared/policy/chunk.py. The paper has memory for all that it admits.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding
from shared.policy.seam import Choice, Floats, View
from shared.policy.slos_serve.best_effort import make_room, queue_of
from shared.policy.slos_serve.draft_length import BATCH_TOKENS

# Section 6.4: "typically plans 1-5 future batches".
HORIZON = 5
# Ours: a batch is planned this much shorter than it may be. Live, nine of ten iterations come
# within 2 ms (docs/simulator.md).
MARGIN_S = 0.001
# Ours: with best-effort decodes among them, decodes alone are planned for this many iterations.
# Their contexts grow meanwhile.
BEST_EFFORT_REPEATS = 16
CLOSE_S = 1e-9


class Standing(NamedTuple):
    """The policy's knowledge beyond the view, in columns along the view's rows. The columns of
    best-effort rows do not matter.
    """

    tpot_s: Floats
    due_unix_s: Floats  # when the prefill must have ended
    idle_s: float  # the tightest TPOT that may come


class Batch(NamedTuple):
    choice: Choice
    seconds: float
    longest_s: float
    goes_on: bool  # standard prefills are left, and the choice holds nothing but entries


def batches(view: View, standing: Standing) -> list[Choice]:
    """One batch, or several while decodes of looser tiers can rest for the sake of prefills."""
    choices = list[Choice]()
    # schDDL, in seconds from the beginning of the first batch, in which all decodes run
    token_due = np.full(view.rows, -np.inf)
    begin_s = 0.0
    while True:
        batch = _batch(view, standing, token_due - begin_s)
        choices.append(batch.choice)
        pace = standing.tpot_s[view.in_decode & view.standard]
        if (
            len(choices) == HORIZON
            or not batch.goes_on
            or not len(pace)
            or pace.max() <= batch.longest_s + CLOSE_S
        ):
            return choices
        ran = np.isin(view.slot, batch.choice.slots)
        view = after(view, batch.choice, batch.seconds)
        begin_s += batch.seconds
        emitted = ran & view.in_decode
        token_due = np.where(
            emitted, np.where(np.isinf(token_due), begin_s, token_due) + standing.tpot_s, token_due
        )


def prefill_first(view: View) -> Choice:
    """The baseline of figure 14: prefills alone, in the order of arrival, while memory allows any;
    else all decodes.
    """
    decodes = chunk.decoding(view)
    queue = (~view.in_decode).nonzero()[0]
    if len(queue):
        alone = Decoding(
            queue[:0], queue[:0], view.kv_free_blocks - len(decodes.rows), BatchShape()
        )
        order = chunk.in_order(view, queue)
        choice = chunk.fill(view, alone, order, limit_tokens=BATCH_TOKENS)
        if len(choice.slots):
            return choice
    return chunk.fill(view, decodes, queue[:0], limit_tokens=0)


# ---------------------------------------------------------------- one batch


def _batch(view: View, standing: Standing, token_due: Floats) -> Batch:
    """One batch. `token_due` is in seconds from its beginning."""
    every = chunk.decoding(view)
    every = make_room(view, every, queue_of(view, every.victims, best_effort=False))
    rows = every.rows[view.standard[every.rows]]
    queued = ~view.in_decode & view.standard
    if len(rows):
        longest_s = float(standing.tpot_s[rows].min())
    else:
        tightest_s = float(standing.tpot_s[queued].min()) if queued.any() else standing.idle_s
        # something must fit
        longest_s = max(tightest_s, 2 * view.profile.batch_s(BatchShape(decodes=1)))
    if queued.any():
        rows = rows[token_due[rows] < 2 * longest_s - CLOSE_S]
    return filled(
        view,
        every,
        every._replace(rows=rows, shape=chunk.decodes_of(view, rows)),
        standing,
        longest_s,
        0.0,
    )


def filled(
    view: View,
    every: Decoding,
    running: Decoding,
    standing: Standing,
    longest_s: float,
    drafted_s: float,
) -> Batch:
    """The running decodes, then prefills by deadline, then best-effort decodes and prefills, within
    `longest_s`.
    """
    queue = queue_of(view, every.victims, best_effort=False)
    order = chunk.in_order(view, queue, standing.due_unix_s[queue])
    budget_s = longest_s - drafted_s - MARGIN_S
    if len(order):
        budget_s = min(
            budget_s, _until_due(view, running, standing, int(order[0]), budget_s, drafted_s)
        )
    choice = chunk.fill(view, running, order, limit_tokens=BATCH_TOKENS, budget_s=budget_s)
    shape = chunk.shape_of(view, running, choice)
    left = int((view.target_tokens[order] - view.computed_tokens[order]).sum())
    if left == shape.prefill_tokens - running.shape.prefill_tokens and view.best_effort.any():
        others = every.rows[view.best_effort[every.rows]]
        others = chunk.in_order(view, others, -view.importance[others])
        others = chunk.as_many_as_fit(
            view, shape, others, budget_s, at_least=0 if len(choice.slots) else 1
        )
        waiting = queue_of(view, every.victims, best_effort=True)
        waiting = chunk.in_order(view, waiting, -view.importance[waiting])
        if len(others) + len(waiting):
            all_rows = np.concatenate((running.rows, others))
            context = chunk.decodes_of(view, others)
            base = running.shape.with_decodes(context.decodes, context.decode_context)
            both = running._replace(rows=all_rows, shape=base)
            choice = chunk.fill(
                view,
                both,
                np.concatenate((order, waiting)),
                limit_tokens=BATCH_TOKENS,
                budget_s=budget_s,
            )
            if choice.repeats > 1:
                choice = replace(choice, repeats=BEST_EFFORT_REPEATS)
    said = len(choice.preempt) > 0
    return Batch(
        choice,
        view.profile.batch_s(shape),
        longest_s,
        left > 0 and not said and len(choice.slots) > 0,
    )


def _until_due(
    view: View, running: Decoding, standing: Standing, first: int, budget_s: float, drafted_s: float
) -> float:
    """Seconds to the earliest prefill deadline, if it lies inside the batch and its prefill can
    still end by then; else `budget_s`.
    """
    until_s = float(standing.due_unix_s[first]) - view.start_unix_s - drafted_s
    if not 0 < until_s < budget_s:
        return budget_s
    cached = int(view.computed_tokens[first])
    left = int(view.target_tokens[first]) - cached
    fits = view.profile.prefill_budget(running.shape, cached, until_s, left) >= left
    return until_s if fits else budget_s


def after(view: View, choice: Choice, seconds: float) -> View:
    """The view when a batch of plain decodes and prefills is done."""
    row_of = np.full(int(view.slot.max(initial=0)) + 1, -1, dtype=np.intp)
    row_of[view.slot] = np.arange(view.rows)
    rows: NDArray[np.intp] = row_of[choice.slots]
    computed, generated = view.computed_tokens.copy(), view.generated_tokens.copy()
    phase = view.phase.copy()
    computed[rows] += choice.caps
    decoded = phase[rows] == chunk.DECODE
    ended = ~decoded & (computed[rows] >= view.target_tokens[rows])
    generated[rows[decoded | ended]] += 1
    phase[rows] = np.where(decoded | ended, chunk.DECODE, chunk.PREFILL)
    held = view.kv_held_blocks.copy()
    top = -(-(computed[rows] + view.unsure_tokens[rows]) // view.block_tokens)
    held[rows] = np.maximum(held[rows], top)
    return replace(
        view,
        start_unix_s=view.start_unix_s + seconds,
        kv_free_blocks=view.kv_free_blocks - int(held.sum() - view.kv_held_blocks.sum()),
        computed_tokens=computed,
        generated_tokens=generated,
        phase=phase,
        kv_held_blocks=held,
    )
