"""Handles workers' reports that an attempt, a request's stay at one replica, has ended."""

from collections.abc import Callable

from services.admission.placement import Placement
from shared import subjects
from shared.bus.api import Call
from shared.clock import Clock
from shared.core.admission.admission import GaveWay, Opened
from shared.core.record import record as life
from shared.errors import BusError
from shared.placing.ending import Ending
from shared.placing.place import Placer
from shared.process.chores import Chores
from shared.schemas import AttemptOver, Settled
from shared.store.outputs import ENDED_TTL_S
from shared.store.records import Records
from shared.vocabulary import RecordState


class Ends:
    """Settles attempts that are over: requests end or go on elsewhere. `soon` asks for a sweep."""

    def __init__(
        self,
        owner: str,
        clock: Clock,
        records: Records,
        placer: Placer,
        ending: Ending,
        placement: Placement,
        chores: Chores,
        soon: Callable[[], None],
    ) -> None:
        self._owner, self._clock, self._records, self._placer = owner, clock, records, placer
        self._ending, self._placement = ending, placement
        self._chores, self._soon = chores, soon

    def on_over(self, over: AttemptOver, call: Call) -> None:
        if call.subject != subjects.over(over.replica):
            return  # a worker reports its own attempts only
        self._chores.spawn(self._settle(over, call), "admission.settle")

    async def _settle(self, over: AttemptOver, call: Call) -> None:
        """Write into the record how an attempt ended, unless the record has moved on since."""
        try:
            stored = await self._ending.end(
                over.key,
                lambda record: life.settled(record, over, self._owner, self._clock.unix_s()),
            )
            if stored is None and await self._is_deleted(over):
                self._soon()
                return  # the worker reports it again, and its log keeps the output until then
        except BusError:
            return  # the worker sends it again
        if stored is not None and stored.record.verdict is None:
            if stored.record.state == RecordState.RELEGATED:
                if not stored.record.resume.measure.tokens:
                    self._placement.feed(GaveWay(stored.record))
                await self._placement.announce_relegated(stored.record, over.message or over.why)
            else:
                await self._placer.publish_status(stored.record, "replaced", over.why)
                self._placement.feed(Opened(stored.record))
        await call.reply(Settled())

    async def _is_deleted(self, over: AttemptOver) -> bool:
        """True if the record was deleted. So soon after its last token it cannot have expired."""
        last_unix_s = over.resume.measure.last_unix_s
        if self._clock.unix_s() - last_unix_s > ENDED_TTL_S / 2:
            return False
        return await self._records.get(over.key) is None
