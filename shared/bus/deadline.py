"""The end of all waits of one connection: a process that stops has one deadline for everything."""

import asyncio
import math


class Deadline:
    """The instant, by the clock of the loop, after which the connection waits for nothing."""

    def __init__(self) -> None:
        self.at_s = math.inf

    def within(self, limit_s: float) -> float:
        """The seconds that are left of a wait of `limit_s`."""
        return max(0.0, min(limit_s, self.at_s - asyncio.get_running_loop().time()))
