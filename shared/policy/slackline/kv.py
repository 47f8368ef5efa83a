"""Shares out KV memory, the scarce resource beside GPU time: which blocks prefills find, and which
requests give theirs up.

- Nobody knows when an output ends. So decodes are taken to end at an even rate, each after half of
  the longest output expected.
- A request that owes only its last token, much later, begins only where it leaves the KV that
  urgent requests lately needed at once.
- A more important prompt that finds none takes blocks of the least important, once it must begin.
"""

import math
from typing import NamedTuple

import numpy as np

from shared.columns import least
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.overdue import WAITING
from shared.policy.seam import Bools, Floats, View
from shared.policy.slackline.bounds import Decodes, Prefills, early

GROWTH = 0.25  # the part of the likely growth of decodes that is kept: some end while others grow
SURE = 2.0  # standard deviations fewer decodes end than on average
PATIENT_S = 30.0  # a whole answer is patient if its prefill is due so much later
FADES_S = 600.0  # in which the peak of what urgent requests need falls to 1/e
TIMES = 2.0  # a prefill must begin so many times its own seconds before it is due


class Room(NamedTuple):
    """The blocks that prefills find."""

    free: float
    ends: float  # decodes that end in a second
    gives: float  # blocks of each

    def until(self, begin_s: Floats) -> Floats:
        """[prefills] blocks that each finds if it begins then."""
        ended = self.ends * np.maximum(begin_s, 0.0)
        blocks: Floats = self.free + self.gives * np.maximum(ended - SURE * np.sqrt(ended), 0.0)
        return blocks


def room_of(view: View, decodes: Decodes, step_s: float) -> Room | None:
    """The KV beside these decodes, while there are any. Best-effort requests give theirs up."""
    count = len(decodes.rows)
    if not count:
        return None
    likely = float(decodes.output_tokens.sum()) / 2
    growth = GROWTH * likely / view.block_tokens
    free = view.kv_free_blocks + float(view.kv_held_blocks[view.best_effort].sum())
    gives = (float(view.kv_held_blocks[decodes.rows].sum()) + growth) / count
    return Room(free - count - growth, count**2 / (likely * max(step_s, 1e-3)), gives)


class Reserve:
    """The KV that patient requests leave to urgent ones."""

    def __init__(self) -> None:
        self._peak_blocks = 0.0
        self._at_unix_s = -math.inf

    def beginning(self, view: View, queue: Prefills) -> Prefills:
        """The queue without the patient requests that may not begin yet."""
        patient = view.whole[queue.rows] & (queue.due_s > PATIENT_S)
        held = float(view.kv_held_blocks.dot(~view.whole & view.standard))
        needed = min(held + float(queue.blocks.dot(~patient)), view.kv_blocks)
        faded = math.exp(min(self._at_unix_s - view.start_unix_s, 0.0) / FADES_S)
        self._peak_blocks = max(needed, self._peak_blocks * faded)
        self._at_unix_s = view.start_unix_s
        if not np.count_nonzero(patient):
            return queue
        begin = (patient & (view.phase[queue.rows] == WAITING)).nonzero()[0]
        others = float(view.kv_held_blocks.dot(view.best_effort))
        spare = view.kv_free_blocks + others - max(0.0, self._peak_blocks - held)
        taken = queue.blocks[begin].cumsum()
        if not len(begin) or taken[-1] <= spare:
            return queue
        begins = np.ones(len(queue.rows), dtype=np.bool_)
        begins[begin[taken > spare]] = False
        if len(begin) == len(begins) and not np.count_nonzero(view.kv_held_blocks):
            begins[0] = True  # nothing else runs here that could end and make room
        return queue.taken(begins)


def claimed(
    view: View, every: Decoding, queue: Prefills, kept: int, relegated: Rows
) -> tuple[Decoding, Prefills]:
    """The decodes that stay, and the queue with the prefills first that claim KV. `kept`: blocks
    that prefills leave free. `relegated`: they keep theirs for now.
    """
    room = every.free_blocks - len(every.rows) - chunk.begun(view, every)[1] - kept
    if float(queue.blocks.sum()) <= room:
        return every, queue
    holds = view.standard & (view.kv_held_blocks > 0)
    holds &= ~view.in_decode | (view.generated_tokens < view.max_tokens)  # others are about to end
    holds[every.victims] = holds[relegated] = False
    lowest = least(view.importance[holds])
    claims = (early(queue.due_s) <= TIMES * queue.seconds) & (view.phase[queue.rows] == WAITING)
    claims &= queue.value > lowest
    victims, ahead = list[int](), list[int]()
    for n in claims.nonzero()[0].tolist():
        blocks = float(queue.blocks[n])
        short = blocks - room
        lost = _victims(view, holds, float(queue.value[n]), short) if short > 0 else every.rows[:0]
        if lost is None:
            continue
        holds[lost] = False
        victims += lost.tolist()
        room += int(view.kv_held_blocks[lost].sum()) - int(blocks)
        ahead.append(n)
    if not victims:
        return every, queue
    rows = every.rows[~np.isin(every.rows, victims)]
    stays = ~np.isin(queue.rows, victims)
    stays[ahead] = False
    gone = np.concatenate((every.victims, np.array(victims, dtype=np.intp)))
    free_blocks = every.free_blocks + int(view.kv_held_blocks[victims].sum())
    fewer = Decoding(rows, gone, free_blocks, chunk.decodes_of(view, rows))
    order = np.concatenate((np.array(ahead, dtype=np.intp), stays.nonzero()[0]))
    return fewer, queue.taken(order)


def _victims(view: View, holds: Bools, value: float, short: float) -> Rows | None:
    """The least valuable requests for their KV, of equals whole answers first, that have enough of
    it, and are less important than this prefill; None: there are none such.
    """
    may = (holds & (view.importance < value)).nonzero()[0]
    held, worth = view.kv_held_blocks[may], view.importance[may]
    keys = (-view.arrived_unix_s[may], ~view.whole[may], worth / np.minimum(held, short))
    order = np.lexsort(keys)
    count = int(np.searchsorted(held[order].cumsum(), short)) + 1
    chosen: Rows = may[order[:count]]
    if count > len(may) or float(view.importance[chosen].sum()) >= value:
        return None
    return chosen
