"""Measures the offset of two processes' clocks, from messages that carry the sender's instant."""

from collections import deque

# Long enough for a message that did not wait; drift (some 50 ppm) stays below 2 ms.
WINDOW_S = 30.0
ENOUGH = 5  # messages before there is an answer; the first few may all have waited


class Offset:
    """Our clock minus a sender's, in seconds: the least difference in the window, since latency
    only adds. Too high by the least latency, below a millisecond within a site.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._messages = 0
        # (received, difference): both grow, so the first is the least
        self._least: deque[tuple[float, float]] = deque()

    def heard(self, received_unix_s: float, sent_unix_s: float) -> None:
        """Note a message: when our clock, which must not go back, had it, and when it was sent."""
        difference_s = received_unix_s - sent_unix_s
        while self._least and self._least[-1][1] >= difference_s:
            self._least.pop()
        self._least.append((received_unix_s, difference_s))
        while self._least[0][0] < received_unix_s - self._window_s:
            self._least.popleft()
        self._messages += 1

    @property
    def offset_s(self) -> float | None:
        """The offset; positive where our clock is ahead. None until enough messages came."""
        return self._least[0][1] if self._messages >= ENOUGH else None
