"""Adds relegated requests to a batch of Ascendra, where standard requests leave room for them.

Relegated requests are ours: the paper drops requests that are too late (section 8.6). Room is what
standard requests leave of the batch's requests, of its tokens, and of a quarter of the time that
the tightest TBT among its decodes allows: a longer batch costs requests that arrive during it more
than it gains. Relegated decodes come before relegated prefills, so that what has begun ends. A
request that sits out keeps its KV, until a standard decode would lose its own
(shared/policy/chunk.py).
"""

import numpy as np

from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.seam import Choice, View

# Of C (lp_batch.py); ours.
SHARE_OF_TIME = 0.25


def standard_of(view: View, every: Decoding) -> Decoding:
    """The decodes that are not relegated. KV stays reserved for the others."""
    rows = every.rows[view.standard[every.rows]]
    if len(rows) == len(every.rows):
        return every
    return every._replace(rows=rows, shape=chunk.decodes_of(view, rows))


def in_the_room_left(
    view: View,
    every: Decoding,
    batch: Choice,
    order: Rows,
    relegated: Rows,
    *,
    limit_requests: int,
    limit_tokens: int,
    budget_s: float,
) -> Choice:
    """The batch of standard requests, with relegated ones added as far as they find room.

    every: all decodes. order, relegated: the prefills, standard and not, as they come. The limits
    are those of the whole batch.
    """
    held = every.rows[view.best_effort[every.rows]]
    if not len(held) and not len(relegated):
        return batch
    standard = standard_of(view, every)
    shape = chunk.shape_of(view, standard, batch)
    budget_s *= SHARE_OF_TIME
    room = min(limit_requests - len(batch.slots), limit_tokens - shape.tokens)
    if room <= 0 or view.profile.batch_s(shape) >= budget_s:
        return batch
    oldest = chunk.in_order(view, held)[:room]
    some = chunk.as_many_as_fit(view, shape, oldest, budget_s, at_least=0)
    rows = np.concatenate((standard.rows, some))
    return chunk.fill(
        view,
        every._replace(rows=rows, shape=chunk.decodes_of(view, rows)),
        np.concatenate((order, relegated[: room - len(some)])),
        limit_tokens=limit_tokens - len(rows),
        budget_s=budget_s,
    )
