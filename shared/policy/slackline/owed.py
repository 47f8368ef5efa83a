"""The time that best-effort requests are owed, so that none waits for ever: they come first in one
iteration once SHARE of the time since they last ran pays for it.

Where no standard prefill waits, which would be late for them, it is FREE_SHARE.
"""

import math

SHARE = 0.01
FREE_SHARE = 0.02


class Owed:
    """The time since which best-effort requests have had nothing."""

    def __init__(self) -> None:
        self._since_unix_s = math.inf  # best-effort requests have waited without a token

    def due(self, now_unix_s: float, iteration_s: float, *, waits: bool) -> bool:
        """True: they come first in this iteration. `iteration_s`: what one takes lately. `waits`: a
        standard prefill does.
        """
        self._since_unix_s = min(self._since_unix_s, now_unix_s)
        share = SHARE if waits else FREE_SHARE
        return share * (now_unix_s - self._since_unix_s) > iteration_s

    def served(self) -> None:
        """This iteration has some of them, or there are none."""
        self._since_unix_s = math.inf
