"""A batch of whole prefills without any decode, for prompts that would be late beside the decodes
and are in time without them.
"""

import numpy as np

from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.seam import Choice, Floats, View


def whole_prefills(
    view: View, every: Decoding, beside: BatchShape, first: Rows, due_s: Floats, limit_s: float
) -> Choice | None:
    """The longest such batch of the prefills in `first`, in order; None if no such batch helps.

    beside: the decodes that would run with them.
    due_s: [first] seconds until each must have ended.
    limit_s: the most that the batch may take.
    """
    if limit_s <= 0 or len(every.victims):
        return None
    alone, count = BatchShape(), 0
    cached = view.computed_tokens[first]
    left = view.target_tokens[first] - cached
    loads_s = view.load_s[first].cumsum()
    columns = (left.tolist(), cached.tolist(), loads_s.tolist(), due_s.tolist())
    for n, (tokens, has, load_s, until_s) in enumerate(zip(*columns, strict=True)):
        alone = alone.with_chunk(tokens, has)
        alone_s = view.profile.batch_s(alone) + load_s
        if alone_s > limit_s:
            break
        beside = beside.with_chunk(tokens, has)
        if alone_s <= until_s < view.profile.batch_s(beside) + load_s:
            count = n + 1
    if not count:
        return None
    room = Decoding(
        every.rows[:0], every.victims, every.free_blocks - len(every.rows), BatchShape()
    )
    choice = chunk.fill(view, room, first[:count], limit_tokens=int(left[:count].sum()))
    return choice if np.array_equal(choice.caps, left[:count]) else None
