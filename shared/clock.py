"""The clock of a process, which never jumps by itself. It begins at the wall clock's time and goes
on with the monotonic clock; shared/process/fleet_time.py moves it to the fleet's time.
"""

import time
from collections.abc import Callable

READINGS = 8  # of several readings, few are torn apart by a preemption
# a clock that goes on while the host is suspended, where the system has one
STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
FASTEST_SLEW = 0.02  # while it is moved by slewing, a second lasts 0.98 to 1.02 s


def _steady_s() -> float:
    return time.clock_gettime(STEADY)


class Clock:
    """The clock; `unix_s()` is now. Virtual runs pass the two clocks of their own."""

    def __init__(
        self, wall_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = _steady_s
    ) -> None:
        self._wall_s, self._monotonic_s = wall_s, monotonic_s
        self._offset_s = self._read_offset_s()
        self._slew, self._slewed_at_s = 0.0, float("-inf")  # the rate of a slew, and its end

    def unix_s(self) -> float:
        now_s = self._monotonic_s()
        if now_s < self._slewed_at_s:
            return now_s + self._offset_s - self._slew * (self._slewed_at_s - now_s)
        return now_s + self._offset_s

    def move(self, by_s: float) -> None:
        """Jump by `by_s` seconds."""
        self._settle()
        self._offset_s += by_s

    def slew(self, by_s: float, over_s: float) -> None:
        """Move by `by_s` seconds over `over_s`, or by fewer, since the clock never goes back."""
        self._settle()
        self._slew = max(-FASTEST_SLEW, min(FASTEST_SLEW, by_s / over_s))
        self._slewed_at_s = self._monotonic_s() + over_s
        self._offset_s += self._slew * over_s

    def host_ahead_s(self) -> float:
        """The seconds by which the host's wall clock is ahead of this one; below 0: behind."""
        return self._read_offset_s() - self._offset_s

    def _settle(self) -> None:
        """End a slew at the point that it has reached."""
        left_s = self._slewed_at_s - self._monotonic_s()
        if left_s > 0.0:
            self._offset_s -= self._slew * left_s
            self._slewed_at_s = float("-inf")

    def _read_offset_s(self) -> float:
        """Wall minus monotonic time, by the fastest of several readings, the most exact."""
        took_s, offset_s = float("inf"), 0.0
        for _ in range(READINGS):
            before_s = self._monotonic_s()
            wall_s = self._wall_s()
            after_s = self._monotonic_s()
            if after_s - before_s < took_s:
                took_s, offset_s = after_s - before_s, wall_s - (before_s + after_s) / 2
        return offset_s
