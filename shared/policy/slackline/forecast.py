"""The requests that give way when not all can be served: a forecast of the queue in the order in
which prefills are due, in the manner of Moore and Hodgson's rule for the fewest late jobs.

Up to each deadline there must be time for the prefills due by then, for the passes that the decodes
make meanwhile, and for the tokens of those whose prefill ended before. At the first deadline where
there is not, a request due by then gives way: one that could not be in time even alone, else the
one whose prefill takes longest for its importance. So the fewest are lost, and of two alike the
less important.
"""

import math
from typing import NamedTuple

import numpy as np

from shared.columns import Indices
from shared.policy.seam import Bools, Floats


class Work(NamedTuple):
    """Prefills to come, in columns; seconds from now."""

    due_s: Floats
    seconds: Floats  # of its prefill in full batches
    value: Floats  # its importance
    pace_s: Floats  # of its decode
    decode_s: Floats  # of one token of its decode
    output_tokens: Floats

    def taken(self, index: Indices) -> "Work":
        return Work(*(column[index] for column in self))

    def beside(self, other: "Work") -> "Work":
        return Work(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class Passes(NamedTuple):
    """The passes that the present decodes need."""

    first_s: float  # the first must have begun by then; inf without a decode
    every_s: float
    seconds: float  # of each
    batch_s: float  # the fixed part of a batch without any

    def until(self, due_s: Floats) -> Floats:
        """[deadlines] seconds of the passes begun by then, or of a batch without any."""
        if not math.isfinite(self.first_s):
            return np.full(len(due_s), self.batch_s)
        count = np.floor((due_s - self.first_s) / self.every_s) + 1.0
        return np.where(count > 0, count * self.seconds, self.batch_s)


def give_way(work: Work, passes: Passes) -> Bools:
    """[prefills] a mask of those that cannot all be in time, so that the others can."""
    order = work.due_s.argsort(kind="stable")
    queue = work.taken(order)
    count = len(order)
    gone = np.zeros(count, dtype=np.bool_)
    spare_s = queue.due_s - passes.until(queue.due_s)
    hopeless = queue.seconds + passes.batch_s > queue.due_s
    size = queue.seconds / np.maximum(queue.value, 1e-9)
    rate = queue.decode_s / queue.pace_s  # of the GPU's time, once it decodes
    most_s = queue.decode_s * queue.output_tokens
    while True:
        here = ~gone
        ahead_s = np.cumsum(np.where(here, queue.seconds, 0.0))
        share = np.where(here, rate, 0.0)
        share_sum, from_sum = np.cumsum(share), np.cumsum(share * queue.due_s)
        decoding_s = np.minimum(
            share_sum * queue.due_s - from_sum, np.cumsum(np.where(here, most_s, 0.0))
        )
        late = here & (ahead_s + decoding_s > spare_s)
        if not late.any():
            break
        k = int(late.argmax())
        among = here[: k + 1]
        lost = among & hopeless[: k + 1]
        if lost.any():
            gone[: k + 1] |= lost
        else:
            gone[int(np.where(among, size[: k + 1], -1.0).argmax())] = True
    found = np.zeros(count, dtype=np.bool_)
    found[order[gone]] = True
    return found
