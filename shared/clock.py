"""The clock of a process: wall time at its start, plus monotonic time since.

It never jumps inside a process. Its readings can be compared between processes as far as the clocks
of their hosts agree; admission estimates the offsets from heartbeats (shared/process/skew.py) and
exports them.
"""

import time
from collections.abc import Callable

READINGS = 8  # of several readings, few are torn apart by a preemption


class Clock:
    """The clock; `unix_s()` is now. Virtual runs pass an object of their own with this method."""

    def __init__(
        self,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall_s, self._monotonic_s = wall_s, monotonic_s
        self._offset_s = self._read_offset_s()

    def unix_s(self) -> float:
        return self._monotonic_s() + self._offset_s

    def adjusted_s(self) -> float:
        """The seconds by which the system's wall clock was moved since this process began."""
        return self._read_offset_s() - self._offset_s

    def _read_offset_s(self) -> float:
        """Wall time minus monotonic time, from the fastest of several readings: its error is at
        most half the time that this reading took.
        """
        took_s, offset_s = float("inf"), 0.0
        for _ in range(READINGS):
            before_s = self._monotonic_s()
            wall_s = self._wall_s()
            after_s = self._monotonic_s()
            if after_s - before_s < took_s:
                took_s, offset_s = after_s - before_s, wall_s - (before_s + after_s) / 2
        return offset_s
