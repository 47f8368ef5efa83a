"""The order and the budgets of the batch of a low-priority (LP) instance of Ascendra: all decodes,
then prefills by value under three budgets (section 5.2, Algorithm 1). policy.py fills the batch.

The budgets are C, the seconds that the iteration may take; M, KV blocks for the whole of a prompt,
by the rules of shared/policy/chunk.py; and N, tokens. Decodes come first and are charged to all
three (section 5.4).

Where this differs from the paper:
- C is not defined there. Here it is the tightest TBT among the standard decodes of the batch (5.4:
  "ongoing decoding completes within the TBT deadline"), and need is what a prefill adds to the
  predicted batch, so that the sum is the time of the batch. A TBT that the decodes alone already
  exceed cannot be kept and binds nothing; without any TBT, N alone binds.
- Algorithm 1 stops at the first request that does not fit, and a request larger than a budget would
  wait for ever. Here that request is cut to what is left (the hybrid batch with chunked prefill of
  appendix A.4). It goes on before all requests that have not begun, since it can no longer leave.
- Best-effort requests come after all others (relegated.py).
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from shared.perf.iteration_time import Profile
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.seam import Choice, Floats, Phase, View

WAITING = int(Phase.WAITING)

Value = Callable[[View, Rows], Floats]  # larger: sooner
ValueName = Literal["edf", "sjf", "fcfs", "ljf"]


def soonest_deadline(view: View, rows: Rows) -> Floats:
    """EDF: the deadline of the next token (the first, unless the request was preempted) or of the
    last token, whichever is sooner.
    """
    value: Floats = -np.minimum(view.next_due_unix_s[rows], view.last_due_unix_s[rows])
    return value


def first_come(view: View, rows: Rows) -> Floats:
    value: Floats = -view.arrived_unix_s[rows]
    return value


def longest_job(view: View, rows: Rows) -> Floats:
    """Longest job first, by tokens: predicted seconds rise with them, so the order is the same."""
    return (view.target_tokens[rows] - view.computed_tokens[rows]).astype(np.float64)


def shortest_job(view: View, rows: Rows) -> Floats:
    return -longest_job(view, rows)


VALUES: Mapping[ValueName, Value] = {
    "edf": soonest_deadline,
    "sjf": shortest_job,
    "fcfs": first_come,
    "ljf": longest_job,
}


def by_value(view: View, queue: Rows, value: Value, most_new: int) -> Rows:
    """The queue in the order of Algorithm 1: prefills begun come first, then the first `most_new`
    of the others.
    """
    begun = view.phase[queue] == chunk.PREFILL
    fresh = queue[~begun]
    if most_new <= 0:
        fresh = fresh[:0]
    elif len(fresh) > most_new:  # a long queue is not sorted as a whole
        key = -value(view, fresh)
        fresh = fresh[key <= np.partition(key, most_new - 1)[most_new - 1]]
        fresh = _sorted(view, fresh, value)[:most_new]
    return _sorted(view, np.concatenate((queue[begun], fresh)), value)


def _sorted(view: View, rows: Rows, value: Value) -> Rows:
    fresh = view.phase[rows] != chunk.PREFILL
    return chunk.in_order(view, rows, fresh, -value(view, rows))


def compute_budget_s(view: View, decodes: Decoding, profile: Profile) -> float:
    """C: the tightest TBT that these decodes by themselves can keep; inf where none has a TBT."""
    tbt_s = view.tbt_s[decodes.rows]
    return float(tbt_s[tbt_s > profile.batch_s(decodes.shape)].min(initial=math.inf))


def begun_in_part(view: View, batch: Choice) -> int:
    """The row whose prefill this batch begins without ending it; -1 if there is none. It stands
    last, where the budgets end.
    """
    if not len(batch.slots):
        return -1
    row = int((view.slot == batch.slots[-1]).nonzero()[0][0])
    return row if view.phase[row] == WAITING and batch.caps[-1] < view.target_tokens[row] else -1
