"""Runs virtual time without an event loop: a heap of calls. Calls of one instant run in the order
in which they were scheduled.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

BUSY_CALLS = 1_000_000  # at one instant, after which the run counts as stuck


class Timeline:
    """`now_s` stands still while a call runs and jumps to the next one's instant."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.calls = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._instant_began = 0  # `calls` when now_s last moved

    def at(self, at_s: float, call: Callable[..., None], *args: Any) -> None:
        """Make the call at that instant, or as soon as possible if it has passed."""
        self._serial += 1
        heappush(self._heap, (max(self.now_s, at_s), self._serial, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heappush(self._heap, (self.now_s + delay_s, self._serial, call, args))

    @property
    def next_s(self) -> float:
        """The instant of the next call; inf without any."""
        return self._heap[0][0] if self._heap else math.inf

    def step(self) -> None:
        """Make the next call. Raises RuntimeError if time no longer moves."""
        at_s, _, call, args = heappop(self._heap)
        self.calls += 1
        if at_s > self.now_s:
            self.now_s = at_s
            self._instant_began = self.calls
        elif self.calls - self._instant_began > BUSY_CALLS:
            raise RuntimeError(f"{BUSY_CALLS} calls at {at_s} s and time does not move")
        call(*args)


class Alarm:
    """Wakes a core at the instant that the core asks for. An alarm has one live entry on the
    timeline; if the core's wish is later by then, it is read again when the entry is due.
    """

    def __init__(
        self, timeline: Timeline, wish: Callable[[], float | None], ring: Callable[[], None]
    ) -> None:
        self._timeline, self._wish, self._ring = timeline, wish, ring
        self._set_s = math.inf

    def reset(self) -> None:
        """The core has handled an event: its wish may be sooner now."""
        wish_s = self._wish()
        if wish_s is not None and wish_s < self._set_s:
            self._set_s = wish_s
            self._timeline.at(wish_s, self._due, wish_s)

    def _due(self, set_s: float) -> None:
        if set_s != self._set_s:
            return
        self._set_s = math.inf
        wish_s = self._wish()
        if wish_s is not None and wish_s <= self._timeline.now_s:
            self._ring()
        else:
            self.reset()
