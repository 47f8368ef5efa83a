"""Computes sums and least values over many windows of time at once. Time is cut into cells; both
ends of a window are inclusive.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Cells = NDArray[np.int64]


class Windows:
    """Windows of cells of time, 0 .. cells - 1. A window with first > last is empty."""

    def __init__(self, first: Cells, last: Cells, cells: int) -> None:
        self.cells = cells
        self._windows = len(first)
        self._some = np.flatnonzero(first <= last)
        self._first, self._last = first[self._some], last[self._some]
        # Two runs of 2**level cells cover a window.
        self._level = np.floor(np.log2(self._last - self._first + 1)).astype(np.int64)
        self._second = self._last - (1 << self._level) + 1
        self._levels = int(self._level.max(initial=0)) + 1

    def least(self, values: Floats) -> Floats:
        """Per window, the least of the cells' values; inf for an empty one."""
        table = np.empty((self._levels, self.cells))
        table[0] = values
        for level in range(1, self._levels):
            half, run = 1 << (level - 1), table[level - 1]
            table[level] = run
            table[level, : self.cells - half] = np.minimum(run[: self.cells - half], run[half:])
        found = np.full(self._windows, np.inf)
        found[self._some] = np.minimum(
            table[self._level, self._first], table[self._level, self._second]
        )
        return found

    def sum(self, values: Floats) -> Floats:
        """Per window, the sum over its cells; 0 for an empty one."""
        summed = np.concatenate(([0.0], np.cumsum(values)))
        found = np.zeros(self._windows)
        found[self._some] = summed[self._last + 1] - summed[self._first]
        return found

    def spread(self, amounts: Floats) -> Floats:
        """Per cell, the sum of the amounts of the windows that contain it."""
        some = amounts[self._some]
        steps = np.bincount(self._first, some, self.cells + 1) - np.bincount(
            self._last + 1, some, self.cells + 1
        )
        summed: Floats = np.cumsum(steps)[:-1]
        return summed
