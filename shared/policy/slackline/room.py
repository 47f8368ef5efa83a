"""The KV that patient requests leave to urgent ones.

A patient request is a whole answer whose prefill is due only in PATIENT_S or later. While many of
them wait, KV is always full, and an urgent request would have to wait until one ends. So a patient
request begins only where what is left covers the most that urgent ones have lately needed at once,
or where nothing else is on the replica.
"""

import math

import numpy as np

from shared.policy.chunk import Rows
from shared.policy.seam import Bools, Floats, View

PATIENT_S = 30.0
FADES_S = 600.0  # in which the peak falls to 1/e
MOST = 0.5  # of the KV


class Room:
    """The peak of what urgent requests need."""

    def __init__(self) -> None:
        self._peak_blocks = 0.0
        self._at_unix_s = -math.inf

    def beginning(self, view: View, queue: Rows, due_s: Floats) -> Rows:
        """The queue without the patient requests that may not begin yet. `due_s` runs along it."""
        patient = view.whole[queue] & (due_s > PATIENT_S)
        begin = (patient & (view.computed_tokens[queue] == 0)).nonzero()[0]
        needed, held = self._urgent(view, queue[~patient])
        needed = min(needed, MOST * view.kv_blocks)
        age_s = view.start_unix_s - self._at_unix_s
        self._peak_blocks = max(needed, self._peak_blocks * math.exp(-max(age_s, 0.0) / FADES_S))
        self._at_unix_s = view.start_unix_s
        if not len(begin):
            return queue
        spare = view.kv_free_blocks - max(0.0, self._peak_blocks - held)
        taken = (-(-view.target_tokens[queue[begin]] // view.block_tokens)).cumsum()
        if taken[-1] <= spare:
            return queue
        begins = np.ones(len(queue), dtype=np.bool_)
        begins[begin[taken > spare]] = False
        if len(begin) == len(queue) and not np.count_nonzero(view.kv_held_blocks):
            begins[0] = True  # nothing else runs here that could end and make room
        return queue[begins]

    def _urgent(self, view: View, waiting: Rows) -> tuple[float, float]:
        """Blocks that urgent requests need at once, and that they hold."""
        urgent: Bools = ~view.whole & view.standard
        held = float(view.kv_held_blocks[urgent].sum())
        if not len(waiting):
            return held, held
        blocks = -(-view.target_tokens[waiting] // view.block_tokens)
        more = np.maximum(blocks - view.kv_held_blocks[waiting], 0).sum()
        return held + float(more), held
