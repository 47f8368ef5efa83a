"""Whole answers that were lately given up: many of them tell overload that lasts from a queue that
is long for a moment.
"""

import math

# What came or was given up counts for 1/e after so many seconds.
FADES_S = 60.0
# From this share on they are many.
MANY = 0.15


class GivenUp:
    """Counts requests with a TTLT: those that came, and those that were relegated."""

    def __init__(self) -> None:
        self._came = self._gone = 0.0
        self._at_unix_s = math.inf

    def came(self, requests: int, now_unix_s: float) -> None:
        self._fade(now_unix_s)
        self._came += requests

    def gave_up(self, requests: int, now_unix_s: float) -> None:
        self._fade(now_unix_s)
        self._gone += requests

    def many(self, now_unix_s: float) -> bool:
        """Tells whether many of those that lately came were given up. Fewer than one is none."""
        self._fade(now_unix_s)
        return self._gone >= MANY * max(self._came, 1.0)

    def _fade(self, now_unix_s: float) -> None:
        faded = math.exp(min(self._at_unix_s - now_unix_s, 0.0) / FADES_S)
        self._came *= faded
        self._gone *= faded
        self._at_unix_s = now_unix_s
