"""SLOs-Serve's best-effort tier within a batch (section 4.1): the time that standard requests
leave, and the KV that they need back.

A preempted request loses its KV only: what it generated stays, and one prefill of all its tokens
resumes it.
"""

import numpy as np

from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.seam import View


def queue_of(view: View, victims: Rows, *, best_effort: bool) -> Rows:
    queue: Rows = (~view.in_decode & (view.best_effort == best_effort)).nonzero()[0]
    return queue[~np.isin(queue, victims)] if len(victims) else queue


def make_room(view: View, every: Decoding, queue: Rows) -> Decoding:
    """The decodes, after best-effort requests have lost as much KV as the prompts in `queue` need,
    which are standard. The least important lose theirs first, then the latest to arrive. A
    best-effort prefill that has begun keeps KV from others for what it still needs (chunk.py), so
    that KV counts as its own.
    """
    if not len(queue) or not np.count_nonzero(view.best_effort):
        return every
    begun = queue_of(view, every.victims, best_effort=True)
    begun = begun[view.phase[begun] == chunk.PREFILL]
    held = view.kv_held_blocks.astype(np.int64)
    needs = np.maximum(-(-(view.target_tokens + view.unsure_tokens) // view.block_tokens) - held, 0)
    short = int(needs[queue].sum() + needs[begun].sum()) + len(every.rows) - every.free_blocks
    if short <= 0:
        return every
    may_go = view.best_effort & (view.kv_held_blocks > 0)
    # the others are about to end
    may_go &= ~view.in_decode | (view.generated_tokens < view.max_tokens)
    may_go[every.victims] = False
    rows = may_go.nonzero()[0]
    rows = rows[np.lexsort((-view.slot[rows], -view.arrived_unix_s[rows], view.importance[rows]))]
    gain = held.copy()
    gain[begun] += needs[begun]
    rows = rows[: int(np.searchsorted(gain[rows].cumsum(), short)) + 1]
    stay = ~np.isin(every.rows, rows)
    victims = np.concatenate((every.victims, rows))
    free_blocks = every.free_blocks + int(held[rows].sum())
    return every._replace(rows=every.rows[stay], victims=victims, free_blocks=free_blocks)
