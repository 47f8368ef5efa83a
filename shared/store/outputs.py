"""Stores the outputs of ended requests, and deletes those that a write in doubt has left behind."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from shared.bus.api import KeyValue
from shared.core.record.record import without_output
from shared.errors import BusError, BusTimeout, StoreDamaged, WrongSequence
from shared.request_timeline import RequestTimeline
from shared.schemas import Record, Resume
from shared.store.seal import opened, read, readable, sealed
from shared.vocabulary import RequestKey

ENDED_TTL_S = 300.0  # how long an ended request can be attached to
OUTPUT_TTL_S = ENDED_TTL_S + 60.0  # an output is stored before its record, and must outlive it
# A record may name a stored output for this long. Sweeps delete orphans after more (ORPHAN_S of
# services/admission/sweep.py), so a process that was paused must not name an older one.
FRESH_S = 10.0
# An output or a body up to this size lies in the record, beside 600 or more other bytes: that costs
# less than a write, a read and a delete. 20,000 open requests (open_limit) have 10 MB of bodies.
SMALL_BYTES = 512
DOUBTFUL_LIMIT = 1024  # outputs that are remembered; the TTL deletes any others

_resume = msgspec.msgpack.Decoder(Resume)


@dataclass(frozen=True, slots=True)
class Output:
    """The output of an ending request, stored before the record; if small, in the record."""

    resume: Resume
    key: str
    stored_at_s: float  # by the event loop's clock, before it was written

    def named_in(self, record: Record) -> Record:
        return without_output(record, self.key) if self.key else record


class Outputs:
    """The outputs, each under `o.<key of its request>.<nonce>` in the bucket of the records."""

    def __init__(self, bucket: KeyValue, nonce: Callable[[], str]) -> None:
        self._bucket, self._nonce = bucket, nonce
        # key, and since when it is in doubt, by the event loop's clock
        self._doubtful: deque[tuple[str, float]] = deque(maxlen=DOUBTFUL_LIMIT)

    async def store(self, ended: Record, before: Output | None = None) -> Output:
        """Store the output of this record, which commits the output once the record is written.
        `before`: the output that an earlier try has stored; it is used or deleted. Raises BusError.
        """
        now_s = asyncio.get_running_loop().time
        resume = replace(ended.resume, diary=RequestTimeline())  # the record keeps the timeline
        if before is not None:
            if before.resume == resume and now_s() - before.stored_at_s < FRESH_S:
                return before
            await self.forget(before, None)
        value = sealed(readable(_resume, resume))
        if not resume.tokens or len(value) <= SMALL_BYTES:
            return Output(resume, "", now_s())
        output = Output(resume, f"o.{ended.key}.{self._nonce()}", now_s())
        try:
            await self._bucket.create(output.key, value, ttl_s=OUTPUT_TTL_S)
        except (WrongSequence, BusTimeout):
            # Nobody else writes this key, so a value there is this output.
            if not await self._has(output):
                self.doubt(output)
                raise
        if now_s() - output.stored_at_s >= FRESH_S:
            self.doubt(output)
            raise BusTimeout(f"{output.key} took too long: this process was paused")
        return output

    async def read(self, record: Record) -> Resume:
        """The output that a record names. Raises StoreDamaged if it is not there whole."""
        entry = await self._bucket.get(record.output_key)
        if entry is None:
            raise StoreDamaged(f"{record.output_key} is missing from the store")
        return read(_resume, record.output_key, opened(record.output_key, entry.value))

    async def forget(self, output: Output | None, record: Record | None) -> None:
        """Delete an output, unless the record names it."""
        if output is None or not output.key or (record and record.output_key == output.key):
            return
        try:
            await self._bucket.delete(output.key)
        except BusError:
            self.doubt(output)

    def doubt(self, output: Output | None) -> None:
        """Remember an output that may be stored without any record that names it: `tidy` looks."""
        if output is not None and output.key:
            self._doubtful.append((output.key, asyncio.get_running_loop().time()))

    async def tidy(self, read_record: Callable[[RequestKey], Awaitable[Record | None]]) -> None:
        """Delete the outputs in doubt whose records have ended without them. A write that was given
        up may still arrive, so each stays in doubt for FRESH_S. Raises BusError.
        """
        until_s = asyncio.get_running_loop().time() - FRESH_S
        for _ in range(len(self._doubtful)):
            key, since_s = self._doubtful[0]
            if since_s > until_s:
                self._doubtful.rotate(-1)
                continue
            try:
                record = await read_record(RequestKey(key.removeprefix("o.").rpartition(".")[0]))
            except StoreDamaged:  # does it name the output? unknown: the TTL deletes that
                self._doubtful.popleft()
                continue
            if record is not None and record.verdict is None:
                self._doubtful.rotate(-1)  # a write that names it may still be on its way
                continue
            if record is None or record.output_key != key:
                await self._bucket.delete(key)
            self._doubtful.popleft()

    async def _has(self, output: Output) -> bool:
        try:
            return await self._bucket.get(output.key) is not None
        except BusError:
            return False
