"""KV that is given up for more important prompts.

A prompt that finds no KV waits until a decode ends. One that is more important than some request
that holds KV waits only as long as it can: until its prefill must begin. Then the least important
lose theirs: as few as are enough, and together less important than it is. A preempted request keeps
its tokens, and computes their KV again once there is room.
"""

import math

import numpy as np

from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.overdue import WAITING
from shared.policy.seam import Bools, View
from shared.policy.slackline.due import Due
from shared.policy.slackline.forecast import early_s
from shared.policy.slackline.iteration import FIRST
from shared.policy.slackline.price import Prices
from shared.policy.slackline.work_ahead import work_of_rows

# A prefill must begin so many times its own seconds before it is to be done.
TIMES = 2.0


def claimed(
    view: View, due: Due, every: Decoding, queue: Rows, gone: Rows, prices: Prices, kept_blocks: int
) -> tuple[Decoding, Rows]:
    """The decodes that stay, and the queue with the prefills first that claim KV. Nothing changes
    where there is KV for the first of the queue, or none of these is more important than others.

    gone: standard requests that leave the standard class now. They give up no KV yet.
    kept_blocks: as in `chunk.fill`.
    """
    first = queue[:FIRST]
    room = every.free_blocks - len(every.rows) - chunk.begun(view, every)[1] - kept_blocks
    tokens = view.target_tokens[first].tolist()
    if sum(tokens) // view.block_tokens + len(tokens) <= room:
        return every, queue
    needed = -(-view.target_tokens[first] // view.block_tokens)
    holds = view.standard & (view.kv_held_blocks > 0)
    # the others are about to end
    holds &= ~view.in_decode | (view.generated_tokens < view.max_tokens)
    holds[every.victims] = holds[gone] = False
    least = float(view.importance[holds].min(initial=math.inf))
    work = work_of_rows(view, due, first, prices)
    claim = early_s(work.due_s) <= TIMES * work.seconds
    claim &= (view.phase[first] == WAITING) & (view.importance[first] > least)
    victims, ahead = list[int](), list[int]()
    for row, blocks in zip(first[claim].tolist(), needed[claim].tolist(), strict=True):
        short = blocks - room
        lost = _victims(view, holds, row, short) if short > 0 else first[:0]
        if lost is None:
            continue
        holds[lost] = False
        victims += lost.tolist()
        room += int(view.kv_held_blocks[lost].sum()) - blocks
        ahead.append(row)
    if not victims:
        return every, queue
    rows = every.rows[~np.isin(every.rows, victims)]
    others = queue[~np.isin(queue, victims + ahead)]
    fewer = Decoding(
        rows,
        np.concatenate((every.victims, np.array(victims, dtype=np.intp))),
        every.free_blocks + int(view.kv_held_blocks[victims].sum()),
        chunk.decodes_of(view, rows),
    )
    return fewer, np.concatenate((np.array(ahead, dtype=np.intp), others))


def _victims(view: View, holds: Bools, row: int, short: int) -> Rows | None:
    """The requests among `holds` that give up their KV for this prefill, which is short of so many
    blocks; None where they would be too few, or too important. One that is enough alone is the
    least important, a whole answer rather than another, and the latest to arrive.
    """
    may = (holds & (view.importance < view.importance[row])).nonzero()[0]
    held, value = view.kv_held_blocks[may], view.importance[may]
    count, alone = 1, held >= short
    if np.count_nonzero(alone):
        may = may[alone]
        order = np.lexsort((-view.arrived_unix_s[may], ~view.whole[may], view.importance[may]))
    else:
        order = np.lexsort((-held, value))
        count = int(np.searchsorted(held[order].cumsum(), short)) + 1
        if count > len(may) or float(value[order[:count]].sum()) >= view.importance[row]:
            return None
    chosen: Rows = may[order[:count]]
    return chosen
