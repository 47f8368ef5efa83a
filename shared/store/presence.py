"""Tells whether a process is connected to the bus: while it is, it answers under its name. A dead
process's connection ends at once, so its leases and requests need not wait for a timeout. A paused
process, or one whose machine is gone, stays connected: only time tells.
"""

import asyncio
from contextlib import suppress

from shared import subjects
from shared.bus.api import Bus, Call, Subscription
from shared.clock import Clock
from shared.errors import BusError, NoResponders, PeerError
from shared.schemas import Present
from shared.subjects import ID_PATTERN

ASK_S = 0.25
CONFIRM_S = 0.25  # absent so long, a process is gone: another broker takes a client in 0.1 s
SILENT_S = 3.0  # a connected process that does not answer is not asked again for this long
KNOWN_LIMIT = 1024  # names that are remembered; beyond, the oldest are forgotten
RETURN_S = 2.5  # after our own connection was lost, others may take this long to come back


async def be_present(bus: Bus, name: str) -> Subscription:
    """Answer under this name until the returned subscription is stopped."""
    answers = set[asyncio.Task[None]]()

    async def reply(call: Call) -> None:
        with suppress(BusError, PeerError):  # it is asked again
            await call.reply(Present())

    def answer(_: Present, call: Call) -> None:
        task = asyncio.ensure_future(reply(call))
        answers.add(task)
        task.add_done_callback(answers.discard)

    return await bus.subscribe(subjects.present(name), Present, answer)


class Absences:
    """Finds out for one process which names nobody serves."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._absent_since: dict[str, float] = {}  # unix time
        self._ask_again: dict[str, float] = {}  # names found connected: when to ask again
        self._reconnects = bus.counters.reconnects
        self._returned_unix_s = float("-inf")

    async def gone(self, name: str) -> bool:
        """True if nobody has served the name for CONFIRM_S since the first question: ask again."""
        now = self._clock.unix_s()
        if self._reconnects != self._bus.counters.reconnects:
            self._reconnects, self._returned_unix_s = self._bus.counters.reconnects, now
            self._absent_since.clear()
        if now - self._returned_unix_s < RETURN_S or now < self._ask_again.get(name, now):
            return False
        if not ID_PATTERN.fullmatch(name):
            return False  # no process of ours has this name
        absent, silent_s = False, 0.0
        try:
            await self._bus.request(subjects.present(name), Present(), Present, timeout_s=ASK_S)
        except NoResponders:
            absent = True
        except (BusError, PeerError):
            silent_s = SILENT_S
        if not absent:
            self._absent_since.pop(name, None)
            if len(self._ask_again) >= KNOWN_LIMIT:
                self._ask_again = {n: at for n, at in self._ask_again.items() if at > now}
            self._ask_again[name] = now + max(CONFIRM_S, silent_s)
            return False
        return now - self._absent_since.setdefault(name, now) >= CONFIRM_S
