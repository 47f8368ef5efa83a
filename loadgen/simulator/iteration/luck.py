"""Draws which drafts are accepted, for the requests of one worker. Draws depend only on a request's
seed and the position, so they are made once for each request, many positions ahead.
"""

import numpy as np

from shared.columns import Indices, Ints
from shared.policy.acceptance import Acceptance, Drafted, Seeds, trees
from shared.policy.seam import Floats

AHEAD_TOKENS = 256
NOWHERE = -1 << 30  # a position before all others


class Luck:
    """The draws, in rows by slot. Slots are taken from the lowest on: few rows are ever used."""

    def __init__(self, acceptance: Acceptance, slots: int) -> None:
        self._acceptance = acceptance
        self._seed: Seeds = np.zeros(slots, dtype=np.uint64)
        self._begin: Indices = np.full(slots, NOWHERE)  # the first position that is drawn
        self._top: Floats = np.zeros((slots, AHEAD_TOKENS))
        self._wanted: Floats = np.zeros((slots, AHEAD_TOKENS))

    def begin(self, slot: int, seed: int) -> None:
        """A request with this seed takes the slot."""
        self._seed[slot], self._begin[slot] = seed, NOWHERE

    def draft(self, slots: Indices, made: Ints, depth: Ints, width: Ints) -> Drafted:
        """The trees of the requests in these slots; the other arguments as Acceptance.draft has
        them.
        """
        levels = np.arange(max(depth.tolist(), default=0))[:, None]
        at = made - self._begin[slots]
        late = (at > AHEAD_TOKENS - len(levels)).nonzero()[0]
        if len(late):
            self._draw(slots[late], made[late])
            at[late] = 0
        index = (slots * AHEAD_TOKENS + at) + levels
        return trees(self._top.take(index), self._wanted.take(index), depth, width)

    def _draw(self, slots: Indices, made: Ints) -> None:
        self._begin[slots] = made
        positions = made + np.arange(AHEAD_TOKENS)[:, None]
        top, wanted = self._acceptance.drawn(self._seed[slots], positions)
        self._top[slots], self._wanted[slots] = top.T, wanted.T
