"""One clock: wall time when the process began, plus monotonic time since.

It never jumps inside a process and can be compared between processes as far as their hosts' clocks
agree; how far they differ is estimated from heartbeats (shared/process/skew.py) and exported by
admission.
"""

import time
from collections.abc import Callable

READINGS = 8  # a preemption between two readings of one clock falls into few of them


class Clock:
    """Call `unix_s()` for now. Virtual runs pass their own object with the same method."""

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
        """How far the system's wall clock has been moved since this process began, in seconds."""
        return self._read_offset_s() - self._offset_s

    def _read_offset_s(self) -> float:
        """Wall minus monotonic, from the tightest of several readings: wrong by at most half of
        what that one took.
        """
        took_s, offset_s = float("inf"), 0.0
        for _ in range(READINGS):
            before_s = self._monotonic_s()
            wall_s = self._wall_s()
            after_s = self._monotonic_s()
            if after_s - before_s < took_s:
                took_s, offset_s = after_s - before_s, wall_s - (before_s + after_s) / 2
        return offset_s
