"""Checks the state of a core (the object that makes a service's decisions, without I/O) while the
service runs, so that a fault is found before it spreads.
"""

from typing import Protocol

import structlog

from shared.clock import Clock

log = structlog.get_logger()

IDLE_S = 10.0  # between two checks of a core that is idle
BUSY_S = 60.0  # between two checks of a core that is never idle while it waits for events
# Checks take at most this share of the time: a check of 0.2 ms (a replica with 256 requests) may
# come as often as the above says, one of 50 ms (a pool of 50,000) every 50 s.
COST_SHARE = 0.001


class Checked(Protocol):
    """A core that can compare the parts of its state with each other."""

    def check(self) -> None:
        """Raises AssertionError unless the parts of the state agree."""


class Audit:
    """Calls `core.check()` now and then. A failure is logged and raised: the state of this process
    cannot be trusted, so it ends, and its supervisor starts it anew with state read from the store.
    """

    def __init__(self, core: Checked, name: str, clock: Clock) -> None:
        self._core, self._name, self._clock = core, name, clock
        began_unix_s = clock.unix_s()
        self._idle_due_unix_s = began_unix_s + IDLE_S
        self._busy_due_unix_s = began_unix_s + BUSY_S

    def look(self, *, idle: bool) -> None:
        """Check if one is due; call it where nothing waits. Raises the check's AssertionError."""
        began_unix_s = self._clock.unix_s()
        if began_unix_s < (self._idle_due_unix_s if idle else self._busy_due_unix_s):
            return
        try:
            self._core.check()
        except Exception as error:
            log.error("core.broken", core=self._name, idle=idle, exc_info=error)
            raise
        ended_unix_s = self._clock.unix_s()
        pause_s = (ended_unix_s - began_unix_s) / COST_SHARE
        self._idle_due_unix_s = ended_unix_s + max(IDLE_S, pause_s)
        self._busy_due_unix_s = ended_unix_s + max(BUSY_S, pause_s)
