"""The records of requests in the store, created and changed only by compare-and-set."""

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog
from msgspec.structs import replace

from shared.bus.api import Entry, KeyValue
from shared.errors import BusError, BusTimeout, StoreDamaged, StoreFull, WrongSequence
from shared.schemas import Body, Record, Resume
from shared.store.outputs import ENDED_TTL_S, SMALL_BYTES, Output, Outputs
from shared.store.seal import opened, read, readable, sealed
from shared.vocabulary import RequestKey

LISTED_AT_ONCE = 64  # records, before other tasks get a turn
WHOLE_EVERY_S = 60.0  # between two listings of all records
LATEST_LIMIT = 20_000  # open records that are remembered as last written, some 3 KB each
IN_RECORD = ".in"  # ends the key of a body that lies in its record
RETRIES = 8  # of a compare-and-set that lost its race; the loser reads the winner's record

log = structlog.get_logger()

_record = msgspec.msgpack.Decoder(Record)
_body = msgspec.msgpack.Decoder(Body)


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it is at one revision."""

    record: Record
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The records. An unreadable one is not from a service: it is logged and kept."""

    open: Sequence[Stored]  # without a verdict
    others: frozenset[RequestKey]  # the keys of those listed that ended, or cannot be read
    outputs: frozenset[str]  # the keys of the outputs that they name


class Records:
    """All records, each under `s.<key>`. Heavy parts are stored once: an ended request's output
    under `o.<key>.<nonce>`, the body under `<key>.<nonce>` in a bucket of its own. So reading all
    records is cheap, and prompts take none of the records' room. Heavy parts are sealed: a damaged
    or missing one is an error. Small parts lie in the record.
    """

    def __init__(
        self,
        bucket: KeyValue,
        bodies: KeyValue,
        nonce: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        self._bucket, self._bodies = bucket, bodies
        self._nonce = nonce
        self._outputs = Outputs(bucket, nonce)
        self._since, self._whole_at_s = 1, -math.inf  # the next listing begins at this revision
        self._latest: dict[RequestKey, Stored] = {}  # open records, as this process wrote them last

    def body_key(self, key: RequestKey) -> str:
        """A new key, so that a body left by a crash is never taken for another request's."""
        return f"{key}.{self._nonce()}"

    def with_small(self, record: Record, body: Body) -> Record:
        """The record, not stored yet, with its body in it where that is small. Raises PeerError."""
        if len(body.prompt) > SMALL_BYTES:
            return record
        value = sealed(readable(_body, body))
        if len(value) > SMALL_BYTES:
            return record
        return replace(record, body=value, body_key=record.body_key + IN_RECORD)

    async def create(self, record: Record, body: Body) -> Stored | None:
        """Store a new record; None if its key exists. A body apart is stored first, and deleted if
        the record does not commit. Raises StoreFull: then neither is stored. After a BusTimeout
        both may be, or only the body: an orphan, which the sweep deletes.
        """
        value = readable(_record, record)
        ttl_s = max(record.expires_unix_s - record.arrived_unix_s, 0.0) + ENDED_TTL_S
        try:
            if not in_record(record.body_key):
                heavy = sealed(readable(_body, body))
                await self._bodies.create(record.body_key, heavy, ttl_s=ttl_s)
        except (WrongSequence, BusTimeout):
            # Nobody else writes this key, so a value there is this body.
            if await self._bodies.get(record.body_key) is None:
                raise
        try:
            revision = await self._bucket.create(f"s.{record.key}", value)
            return self._wrote(Stored(record, revision))
        except StoreFull:
            await self.forget_body(record.body_key)
            raise
        except (WrongSequence, BusTimeout) as error:
            stored = await self.get(record.key)
            if stored is None and isinstance(error, BusTimeout):
                raise
            if stored is not None and stored.record.body_key == record.body_key:
                return stored  # only the answer was lost
            await self.forget_body(record.body_key)
            return None

    async def get(self, key: RequestKey) -> Stored | None:
        entry = await self._bucket.get(f"s.{key}")
        return None if entry is None else _stored(f"s.{key}", entry)

    async def body(self, key: str) -> Body | None:
        """The body under a record's `body_key`; None if there is none yet. Raises StoreDamaged."""
        entry = await self._bodies.get(key)
        return None if entry is None else read(_body, key, opened(key, entry.value))

    async def body_of(self, record: Record) -> Body | None:
        """The body of a record; None if there is none (yet). Raises StoreDamaged."""
        if not in_record(record.body_key):
            return await self.body(record.body_key)
        if not record.body:
            return None
        return read(_body, record.body_key, opened(record.body_key, record.body))

    async def change(
        self, key: RequestKey, step: Callable[[Record], Record | None]
    ) -> Stored | None:
        """Apply `step`, an event of the record, until its result is written. None if there is no
        record or the event does not apply. A record that this process wrote last is read again only
        if the event does not apply to it, or if another wrote since. A lost answer is cleared up by
        reading. Raises BusTimeout.
        """
        output: Output | None = None
        name = self._nonce()
        try:
            latest = self._latest.pop(key, None)
            stored = latest or await self.get(key)
            for _ in range(RETRIES):
                changed = None if stored is None else step(stored.record)
                if changed is None and latest is not None and stored is latest:
                    stored = await self.get(key)
                    continue
                if stored is None or changed is None:
                    await self._outputs.forget(output, None if stored is None else stored.record)
                    return None
                if changed.verdict is not None:
                    output = await self._outputs.store(changed, output)
                    changed = replace(output.named_in(changed), body=b"", ended_by=name)
                written, before = await self._write(stored, changed), stored
                if written is not None:
                    return written
                stored = await self.get(key)
                if (
                    stored is not None
                    and stored.revision != before.revision
                    and (stored.record == changed or stored.record.ended_by == name)
                ):
                    return stored  # only the answer was lost
            raise BusTimeout(f"the record of {key} kept changing")
        except BusError:
            self._outputs.doubt(output)
            raise

    async def _write(self, before: Stored, changed: Record) -> Stored | None:
        """Write the record by compare-and-set; None if that failed, or may have failed."""
        ttl_s = None if changed.verdict is None else ENDED_TTL_S
        value = readable(_record, changed)
        try:
            revision = await self._bucket.update(
                f"s.{changed.key}", value, before.revision, ttl_s=ttl_s
            )
        except (WrongSequence, BusTimeout):
            return None
        return self._wrote(Stored(changed, revision))

    def _wrote(self, stored: Stored) -> Stored:
        """Remember an open record; beyond the limit, the one written longest ago is forgotten."""
        if stored.record.verdict is None:
            self._latest.pop(stored.record.key, None)
            self._latest[stored.record.key] = stored
            if len(self._latest) > LATEST_LIMIT:
                del self._latest[next(iter(self._latest))]
        return stored

    async def tidy(self) -> None:
        """Delete outputs in doubt (was it stored?) whose records ended without them. BusError."""

        async def record_of(key: RequestKey) -> Record | None:
            stored = await self.get(key)
            return None if stored is None else stored.record

        await self._outputs.tidy(record_of)

    async def output(self, record: Record) -> Resume:
        """The output of an ended request, or of earlier attempts. Raises StoreDamaged."""
        if not record.output_key:
            return record.resume
        return await self._outputs.read(record)

    async def forget_body(self, key: str) -> None:
        """Delete the body under a record's `body_key`, or leave an orphan, for the sweep."""
        if in_record(key):
            return
        with suppress(BusError):
            await self._bodies.delete(key)

    async def bodies(self) -> Sequence[str]:
        """The keys of all bodies, also of those deleted a moment ago."""
        return await self._bodies.names()

    async def outputs(self) -> Sequence[str]:
        return [key for key in await self._bucket.names() if key.startswith("o.")]

    async def forget_output(self, key: str) -> None:
        """Delete an output that no record names. If the store does not answer, its TTL takes it."""
        with suppress(BusError):
            await self._bucket.delete(key)

    async def restore(self, ended: Record) -> Stored | None:
        """Store an ended record under a key whose record was deleted; None if the key is taken."""
        ended = (await self._outputs.store(ended)).named_in(ended)
        value = readable(_record, ended)
        try:
            revision = await self._bucket.create(f"s.{ended.key}", value, ttl_s=ENDED_TTL_S)
        except WrongSequence:
            return None
        return Stored(ended, revision)

    async def open(self) -> Sequence[Stored]:
        """Every record without a verdict."""
        return (await self.listing()).open

    async def listing(self, *, whole: bool = False) -> Listing:
        """Every open record, and those ended since the last listing; or all (`whole`). Records
        older than the oldest open one have ended for good, and changes are newer, so the next
        listing begins there: to read all ended records costs as much as serving. Every
        WHOLE_EVERY_S all are read, in case the store lost writes.
        """
        found, others, outputs = list[Stored](), set[RequestKey](), set[str]()
        now_s = asyncio.get_running_loop().time()
        if whole or now_s - self._whole_at_s >= WHOLE_EVERY_S:
            self._whole_at_s, self._since = now_s, 1
        entries = await self._bucket.scan("s.", self._since)
        for n, (name, entry) in enumerate(entries, 1):
            if n % LISTED_AT_ONCE == 0:  # there may be thousands of records
                await asyncio.sleep(0)
            try:
                stored = _stored(name, entry)
            except StoreDamaged as error:
                log.warning("record.unreadable", key=name, error=error.message)
                others.add(RequestKey(name.removeprefix("s.")))
                continue
            outputs.add(stored.record.output_key)
            if stored.record.verdict is None:
                found.append(stored)
            else:
                others.add(stored.record.key)
        if entries:
            newest = max(entry.revision for _, entry in entries)
            self._since = min((stored.revision for stored in found), default=newest + 1)
        return Listing(found, frozenset(others), frozenset(outputs))


def in_record(body_key: str) -> bool:
    return body_key.endswith(IN_RECORD)


def _stored(name: str, entry: Entry) -> Stored:
    """The record under this name. Raises StoreDamaged if no service can have written it."""
    record = read(_record, name, entry.value)
    if name != f"s.{record.key}":
        raise StoreDamaged(f"{name} has the record of another key")
    return Stored(record, entry.revision)
