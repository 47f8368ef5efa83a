"""Ends the requests whose records were deleted by hand, and tells their clients.

No service deletes a record: it expires once its request has ended. So a request that was open at
the last listing, or came since, has a record. If a request has none, its attempt is ended, and the
record is written again with a verdict.
"""

from collections.abc import Awaitable, Callable, Sequence

import structlog

from services.admission.workers import Workers
from shared.bus.api import Bus
from shared.clock import Clock
from shared.core.record import record as life
from shared.errors import BusError, PeerError
from shared.placing.ending import Ending
from shared.placing.place import Placer
from shared.process.logs import traced
from shared.schemas import LogEntry, Record, Resume
from shared.store import acklog
from shared.store.acklog import Story
from shared.store.outputs import ENDED_TTL_S
from shared.store.records import Listing, Records
from shared.vocabulary import ReplicaId, RequestKey

log = structlog.get_logger()

Fence = Callable[[ReplicaId, str], Awaitable[Sequence[LogEntry] | None]]


class Deletions:
    """The open requests that one admission instance knows of."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        records: Records,
        placer: Placer,
        workers: Workers,
        ending: Ending,
        fenced_log: Fence,
    ) -> None:
        """`fenced_log` reads the log of an incarnation that is lost and fenced; None: it lives."""
        self._bus, self._clock, self._records = bus, clock, records
        self._placer, self._workers, self._ending = placer, workers, ending
        self._fenced_log = fenced_log
        self._open: dict[RequestKey, Record] = {}  # as last seen
        self._listed_unix_s = clock.unix_s()

    def __contains__(self, key: RequestKey) -> bool:
        """True for a request that was open when last seen."""
        return key in self._open

    def opened(self, record: Record) -> None:
        """Note that a record was stored."""
        self._open[record.key] = record

    async def end(self, listing: Listing) -> bool:
        """End the requests that have no record any more. False: one could not be ended yet. After a
        long time without a listing nothing is concluded: records that ended may have expired.
        """
        now = self._clock.unix_s()
        silent_s, self._listed_unix_s = now - self._listed_unix_s, now
        known = {stored.record.key: stored.record for stored in listing.open}
        missing = [
            record
            for key, record in self._open.items()
            if key not in known and key not in listing.others
        ]
        if silent_s > ENDED_TTL_S / 2:
            missing = []
        self._open = known | {record.key: record for record in missing}
        ended = True
        for record in missing:
            try:
                if await self._records.get(record.key) is not None:
                    continue  # it was stored after the listing had begun
                if await self._end(record):
                    del self._open[record.key]
                else:
                    ended = False
            except (BusError, PeerError) as error:  # the others are ended all the same
                log.warning("deletion.doubtful", request=record.key, error=str(error))
                ended = False
        return ended

    async def _end(self, seen: Record) -> bool:
        """End attempt and request. False: they may still go on. Raises BusError, PeerError."""
        record, story = await self._newest(seen)
        if record.replica is not None and (story is None or not story.ended):
            lives = self._workers.lives(record.replica, record.incarnation)
            if lives is None:
                return False
            if lives:
                if await self._placer.withdraw(record) is not None:
                    return False  # the log has its end now
            elif await self._fenced_log(record.replica, record.incarnation) is None:
                return False
        resume, why, relegated = record.resume, "", False
        if story is not None:
            resume, why, relegated = _output(record, story), story.ended, story.relegated
        with traced(record.traceparent):
            log.warning("record.deleted", request=record.key)
        now = self._clock.unix_s()
        await self._ending.restore(
            life.deleted(record, now, resume=resume, why=why, relegated=relegated)
        )
        return True

    async def _newest(self, record: Record) -> tuple[Record, Story | None]:
        """The record at its newest attempt that a log has, and that attempt's story, if any."""
        newest = None
        named = () if record.replica is None else (record.replica,)
        for replica in sorted({*self._workers.replicas, *named}):
            for (key, attempt, incarnation), story in (
                await acklog.read(self._bus, replica)
            ).items():
                if key == record.key and attempt >= record.attempt:
                    record = life.as_logged(record, attempt, replica, incarnation)
                    newest = story
        return record, newest


def _output(record: Record, story: Story) -> Resume:
    return story.resume(record) if story.over is None else story.over.resume
