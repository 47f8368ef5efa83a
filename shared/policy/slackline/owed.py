"""The time that best-effort requests are owed: so that none waits for ever, they come first in one
iteration after SHARE of the time has passed without them.
"""

import math

SHARE = 0.02


class Owed:
    """Seconds of the GPU that best-effort requests have not had."""

    def __init__(self) -> None:
        self._since_unix_s = math.inf  # best-effort requests have waited without a token

    def due(self, now_unix_s: float, iteration_s: float) -> bool:
        """True: they come first in this iteration. `iteration_s`: what one takes lately."""
        self._since_unix_s = min(self._since_unix_s, now_unix_s)
        return SHARE * (now_unix_s - self._since_unix_s) > iteration_s

    def served(self) -> None:
        """This iteration has some of them, or there are none."""
        self._since_unix_s = math.inf
