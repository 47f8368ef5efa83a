"""Stores a worker's acks (reports of iterations) in its log, in order, before they leave."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from shared.bus.api import Bus
from shared.core.worker.step import Finished
from shared.errors import BusError, PeerError, StoreFull, WrongSequence
from shared.schemas import Fenced, LogEntry, Registered, Snapshot
from shared.store.acklog import decode_entry, encode_entry
from shared.store.records import Records
from shared.subjects import ack_log
from shared.vocabulary import ReplicaId

log = structlog.get_logger()

RETRY_S = 0.1
FULL_S = 1.0  # until a log without room is tried again
# Of acks, after which a snapshot replaces them. The log has room for 128 MB (shared/bus/
# provision.py): two snapshots, of 56 MB each, with the acks between them. A token with the most
# log-probabilities takes 450 bytes, so 256 requests write 16 MB in 140 acks.
SNAPSHOT_BYTES = 16 * 1024 * 1024
FENCE_S = 1.0  # the longest look for a fence: a heartbeat waits for it


class FencedError(Exception):
    """An admission declared this life of the worker lost, or another began after it."""


@dataclass(frozen=True, slots=True)
class Job:
    """An ack to store, and the snapshot to store behind it."""

    finished: Finished
    snapshots: Sequence[Snapshot] = ()


class AckWriter:
    """The one writer of a replica's log, for one incarnation."""

    def __init__(
        self, bus: Bus, replica: ReplicaId, incarnation: str, records: Records, *, limit: int
    ) -> None:
        self._bus = bus
        self._replica = replica
        self._incarnation = incarnation
        self._subject = ack_log(replica)
        self._records = records
        self._last_seq = 0
        self._may_trim = False
        self._snapshot_seq = 0  # of the newest snapshot's first page; 0: the log is trimmed to it
        self.acks_bytes = 0  # appended since whoever takes the snapshots set it to 0
        self.waits = False  # the store does not take what is to be appended now
        self.queue: asyncio.Queue[Job] = asyncio.Queue(limit)

    async def register(self) -> bool:
        """Take the log over, however long it takes: this fences the writer before. Returns True."""
        while True:
            last = await self._last()
            self._last_seq = 0 if last is None else last[0]
            try:
                await self._append(Registered(incarnation=self._incarnation))
                return True
            except FencedError:
                continue  # another entry came between; look again

    async def run(self, after: Callable[[Finished], Awaitable[None]]) -> None:
        """Store queued acks, until cancelled. Raises FencedError."""
        while True:
            job = await self.queue.get()
            self.acks_bytes += await self._append(job.finished.ack)
            await after(job.finished)
            if job.snapshots:
                await self._snapshot(job.snapshots)
            self.queue.task_done()

    async def _append(self, entry: LogEntry) -> int:
        """Store the entry, however long that takes; returns its size. Raises FencedError."""
        payload = encode_entry(entry)
        while True:
            try:
                self._last_seq = await self._bus.acks.append(self._subject, payload, self._last_seq)
                break
            except BusError as error:
                if await self._is_stored(payload, error):
                    break
                self.waits = True
                log.warning("ack.waits", replica=self._replica, error=str(error))
                full = isinstance(error, StoreFull)
                if full and self._snapshot_seq:
                    await self._trim()
                await asyncio.sleep(FULL_S if full else RETRY_S)
        self.waits = False
        return len(payload)

    async def _is_stored(self, payload: bytes, error: BusError) -> bool:
        """True if a failed append was stored; False: try again. Raises FencedError. A server behind
        may answer the read, so only an entry after our last one tells.
        """
        last_seq, last = await self._last() or (0, b"")
        if last_seq > self._last_seq and last == payload:
            self._last_seq = last_seq
            return True
        refused_at = error.last_seq if isinstance(error, WrongSequence) else None
        lost = refused_at is not None and refused_at < self._last_seq  # the log, by its leader
        if last_seq > self._last_seq or lost:
            raise FencedError(f"the log of {self._replica} has another writer") from error
        return False

    async def _last(self) -> tuple[int, bytes] | None:
        while True:
            try:
                return await self._bus.acks.last(self._subject)
            except BusError:
                await asyncio.sleep(RETRY_S)

    async def _snapshot(self, pages: Sequence[Snapshot]) -> None:
        """Write the pages, then trim the log before them."""
        first = 0
        for page in pages:
            await self._append(page)
            first = first or self._last_seq
        self._snapshot_seq = first
        await self._trim()

    async def _trim(self) -> None:
        """Trim the log before the newest snapshot, once no request needs an earlier incarnation."""
        try:
            if not self._may_trim:
                held = [
                    s.record
                    for s in await self._records.open()
                    if s.record.replica == self._replica
                ]
                self._may_trim = all(record.incarnation == self._incarnation for record in held)
            if self._may_trim:
                await self._bus.acks.trim(self._subject, self._snapshot_seq)
                self._snapshot_seq = 0
        except BusError:
            return  # the next snapshot trims more

    async def fenced(self) -> bool:
        """True if another writer has appended since, which an idle worker would not notice."""
        try:
            async with asyncio.timeout(FENCE_S):
                last = await self._bus.acks.last(self._subject)
        except (BusError, TimeoutError):
            return False  # the next look, or the next append, finds it
        # a server that is behind may answer, with an entry of a former incarnation
        if last is None or last[0] <= self._last_seq or not self.queue.empty():
            return False
        try:
            entry = decode_entry(last[1])
        except PeerError:
            return True  # not our entry: our next append would fail
        return isinstance(entry, Fenced) or entry.incarnation != self._incarnation
