"""Notices pauses of this process: requests that it receives right after a pause are old."""

import asyncio

from shared.bus.api import Bus
from shared.clock import Clock
from shared.errors import BusError

BEAT_S = 0.25
# Clients wait so long (`Patience.answer_s`); then another admission may have refused them.
STALLED_S = 2.0


class Stall:
    """Tells whether messages may be old: they are, if sent before the end of a pause of STALLED_S.
    NATS keeps the order, so all old messages have come once a flush is answered.
    """

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._beat_unix_s = clock.unix_s()
        self._over = asyncio.Event()
        self._over.set()

    def look(self) -> bool:
        """True if messages received now may be old."""
        now = self._clock.unix_s()
        if now - self._beat_unix_s > STALLED_S:
            self._over.clear()
        self._beat_unix_s = now
        return not self._over.is_set()

    async def watch(self) -> None:
        """Look all the time, until cancelled."""
        while True:
            if self.look():
                try:
                    await self._bus.flush(STALLED_S / 2)
                    self._over.set()
                except BusError:
                    pass  # asked again
            await asyncio.sleep(BEAT_S)
