"""Gives clients that attach (come back to a request) the output so far, from record or log."""

import asyncio
from collections.abc import Callable

import structlog

from shared import subjects
from shared.bus.api import Bus, Call
from shared.clock import Clock
from shared.columns import unpack_list
from shared.errors import BusError, PeerError, StoreDamaged
from shared.schemas import Attach, Record, Refused, Replay, Resume
from shared.store import acklog
from shared.store.records import Records
from shared.vocabulary import ReplicaId, RequestKey

log = structlog.get_logger()

# A replay may read a log this old. A client that attaches too early does so again.
LOG_CACHE_S = 0.3


class Replays:
    """Answers of one admission instance to Attach. They share what was read from the logs."""

    def __init__(
        self, bus: Bus, records: Records, clock: Clock, missed: Callable[[RequestKey], None]
    ) -> None:
        """`missed` is told of a request that has no record."""
        self._bus, self._records, self._clock, self._missed = bus, records, clock, missed
        self._stories: dict[ReplicaId, tuple[float, acklog.Stories]] = {}  # read at, by replica
        self._locks: dict[ReplicaId, asyncio.Lock] = {}

    async def answer(self, attach: Attach, call: Call) -> None:
        """Reply with a Replay, or Refused."""
        try:
            tenant = subjects.tenant_of(call.subject, attach.tenant)
            key = subjects.request_key(tenant, attach.request_id)
            stored = await self._records.get(key)
            if stored is None:
                self._missed(key)
                message = "no such request, or it ended long ago"
                await call.reply(Refused(code="not_found", message=message, param="request_id"))
                return
            record = stored.record
            resume = await self.so_far(record)
        except PeerError as error:
            if isinstance(error, StoreDamaged):
                log.error("store.damaged", error=error.message)
            await call.reply(Refused(code=error.code, message=error.message, param=error.param))
            return
        except BusError:
            message = "the store did not answer"
            refused = Refused(code="server_is_overloaded", message=message, retry_after_s=1.0)
            await call.reply(refused)
            return
        replay = Replay(
            stream_subject=record.stream_subject,
            offset=attach.from_token,
            tokens=unpack_list(resume.tokens)[attach.from_token :],
            text=resume.text,
            text_offset=0,
            verdict=record.verdict,
            logprobs=resume.logprobs[attach.from_token :],
        )
        await call.reply(replay)

    async def so_far(self, record: Record) -> Resume:
        """The output of a request: from the log while an attempt runs, else from the record."""
        if record.verdict is None and record.replica is not None:
            stories = await self._read(record.replica)
            story = stories.get((record.key, record.attempt, record.incarnation))
            if story is not None:
                return story.resume(record)
        return await self._records.output(record)

    async def _read(self, replica: ReplicaId) -> acklog.Stories:
        """All attempts in a replica's log, read at most every LOG_CACHE_S for all who attach."""
        async with self._locks.setdefault(replica, asyncio.Lock()):
            read_unix_s, stories = self._stories.get(replica, (0.0, {}))
            if self._clock.unix_s() - read_unix_s > LOG_CACHE_S:
                stories = await acklog.read(self._bus, replica)
                self._stories[replica] = (self._clock.unix_s(), stories)
            return stories
