"""Peak memory (SOLA section 5.1, after LightLLM): the most KV that a set of requests will need, and
whether one more may begin.

All requests grow by a token in each iteration until they end. Sorted by tokens left, most first,
the k-th ends when the first k have has_j + left_k tokens each, so the peak is the largest of these
sums. Blocks are counted from above: each request may waste all but one token of its last block.

Where we differ: the paper adds up what this iteration runs and compares with the KV that is free;
here everything that holds KV counts, and the whole capacity, as in LightLLM. A peak of exactly the
capacity is allowed; otherwise a request that needs all of it would never begin. As printed, a
request that does not fit is passed over and those behind it may begin, so a large one can wait
long. Requests that must wait between two tokens do not grow meanwhile, so for them the sum is no
strict bound, and lengths are predicted: KV may run short after all.
"""

import numpy as np

from shared.policy.chunk import Decoding
from shared.policy.seam import Bools, Floats, View
from shared.policy.sola.state import Prefills, State


class PeakMemory:
    """The peak KV of requests that have `has` tokens (or are promised them) and will add `left`
    more. Both are in tokens, in any order.
    """

    def __init__(self, has: Floats, left: Floats, block_tokens: int) -> None:
        order = np.argsort(-left, kind="stable")
        self._block_tokens = block_tokens
        self._arrange(has[order] + (block_tokens - 1), left[order])

    def _arrange(self, has: Floats, left: Floats) -> None:
        """Sets the sums anew. `left` falls along the requests."""
        self._has, self._left = has, left
        self._sum = np.concatenate(((0.0,), has.cumsum()))
        ends = self._sum[1:] + left * np.arange(1, len(left) + 1)  # tokens held when the k-th ends
        # the largest sum among the first k
        self._before = np.maximum.accumulate(np.concatenate(((0.0,), ends)))
        # the largest sum from k on, with one more request growing along
        self._beside = np.concatenate(
            (np.maximum.accumulate((ends + left)[::-1])[::-1], (-np.inf,))
        )

    def with_one(self, has: Floats, left: Floats) -> Floats:
        """[candidates] the peak in blocks with each candidate, alone, in addition."""
        has = has + (self._block_tokens - 1)
        at = np.searchsorted(-self._left, -left, side="right")
        own = self._sum[at] + has + (at + 1) * left
        peak: Floats = (
            np.maximum(np.maximum(own, self._before[at]), self._beside[at] + has)
            // self._block_tokens
        )
        return peak

    def add(self, has: float, left: float) -> None:
        at = int(np.searchsorted(-self._left, -left, side="right"))
        self._arrange(
            np.insert(self._has, at, has + (self._block_tokens - 1)),
            np.insert(self._left, at, left),
        )


class Room:
    """Algorithm 1, lines 6 to 10: the requests of an ordered queue that may begin beside what holds
    KV and those taken before. Requests that may not begin are passed over.

    The prediction is made only where it could say no (section 6.4 has a threshold for that), so not
    where all requests fit at full length.
    """

    def __init__(
        self, memory: PeakMemory | None, kv_blocks: int, has: Floats, left: Floats, begun: Bools
    ) -> None:
        """`has`, `left`, `begun` run along the queue; those begun are in the memory's sum already.
        No memory: everyone may.
        """
        self._memory, self._kv_blocks = memory, kv_blocks
        self._has, self._left, self._begun = has, left, begun
        self.may: Bools = np.ones(len(begun), dtype=np.bool_)
        self._look()

    def _look(self) -> None:
        if self._memory is not None:
            self.may = self._begun | (
                self._memory.with_one(self._has, self._left) <= self._kv_blocks
            )

    def first(self, at: int) -> int:
        """The first position from `at` on whose request may begin; if none, the queue's length."""
        return at + int(self.may[at:].argmax()) if self.may[at:].any() else len(self.may)

    def take(self, at: int) -> None:
        if self._memory is not None and not self._begun[at]:
            self._memory.add(float(self._has[at]), float(self._left[at]))
            self._look()


def room_of(
    view: View, running: Decoding, state: State, prefills: Prefills, *, predicts: bool = True
) -> Room:
    """The room beside the running decodes and the prefills begun. The token that a prefill ends
    with costs no KV of its own.

    Where `predicts` is False, no request is held back for KV that others will need.
    """
    queue, begun = prefills.rows, prefills.begun
    has = (view.target_tokens[queue] + view.unsure_tokens[queue]).astype(np.float64)
    left = state.left_out[queue] - 1
    held = view.top_tokens[running.rows].astype(np.float64)
    growing = state.left_out[running.rows]
    memory = None
    if (
        predicts
        and np.ceil(np.concatenate((held + growing, has + left)) / view.block_tokens).sum()
        > view.kv_blocks
    ):
        memory = PeakMemory(
            np.concatenate((held, has[begun])),
            np.concatenate((growing, left[begun])),
            view.block_tokens,
        )
    return Room(memory, view.kv_blocks, has, left, begun)
