"""One clock: wall time when the process began, plus monotonic time since.

It never jumps inside a process and can be compared between processes; the offset between hosts is estimated and exported.
"""

import time


class Clock:
    """Call `unix_s()` for now. Virtual runs pass their own object with the same method."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def unix_s(self) -> float:
        return time.monotonic() + self._offset_s

    def adjusted_s(self) -> float:
        """How far the system's wall clock has been moved since this process began, in seconds."""
        return time.time() - self.unix_s()
