"""Tells clients of refusals, counts them, and tells watchers of those for want of room."""

import asyncio
from collections import Counter
from contextlib import suppress

from shared import subjects
from shared.bus.api import Bus, Call
from shared.errors import BusError
from shared.placing.outcomes import Outcomes
from shared.process.chores import Chores
from shared.schemas import Ended, Record, Refused

NOTICE_S = 0.1  # one notice tells of the refusals of this time


class Refusals:
    def __init__(self, bus: Bus, outcomes: Outcomes, chores: Chores) -> None:
        self._bus, self._outcomes, self._chores = bus, outcomes, chores
        self._unsaid: Counter[str] = Counter()  # by tier: those not told to who watches

    async def answer(self, call: Call, refused: Refused, record: Record | None = None) -> None:
        """`record`: what would have been stored of the request, if it was read."""
        tenant, tier = call.subject.split(".")[-2:]
        self.note(tenant, tier, refused.code, record)
        await call.reply(refused)

    def note(self, tenant: str, tier: str, code: str, record: Record | None = None) -> None:
        self._outcomes.refused(tenant, tier, code, record)
        if code == "slow_down":
            if not self._unsaid:
                self._chores.spawn(self._tell_watchers(), "admission.refusals")
            self._unsaid[tier] += 1

    async def _tell_watchers(self) -> None:
        await asyncio.sleep(NOTICE_S)
        refusals, self._unsaid = self._unsaid, Counter()
        for tier, requests in refusals.items():
            with suppress(BusError):
                await self._bus.publish(subjects.ENDED, Ended(tier=tier, requests=requests))
