"""The records of requests in the store, created and changed by compare-and-set alone."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog

from shared.bus.api import Entry, KeyValue
from shared.core.record import without_output
from shared.errors import (
    BusError,
    BusTimeout,
    PeerError,
    StoreDamaged,
    StoreFull,
    WrongSequence,
)
from shared.schemas import Body, Record, Resume
from shared.store.seal import opened, sealed
from shared.vocabulary import RequestKey

ENDED_TTL_S = 300.0  # how long an ended request can be attached to
OUTPUT_TTL_S = ENDED_TTL_S + 60.0  # it is stored first, and must not go first
RETRIES = 8  # of a compare-and-set that lost its race; the loser reads what the winner wrote

T = TypeVar("T")
log = structlog.get_logger()

_encode = msgspec.msgpack.Encoder().encode
_record = msgspec.msgpack.Decoder(Record)
_body = msgspec.msgpack.Decoder(Body)
_resume = msgspec.msgpack.Decoder(Resume)


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it is at one revision."""

    record: Record
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All records. An unreadable one is not ours: it is logged and left alone."""

    open: Sequence[Stored]  # without a verdict
    others: frozenset[RequestKey]  # the keys of those that ended, or cannot be read


@dataclass(frozen=True, slots=True)
class _Output:
    """The output of a request that ends, and where it is stored before its record names it."""

    resume: Resume
    key: str


class Records:
    """The record is under `s.<key>`. The heavy parts are stored once: the output of an ended
    request under `o.<key>.<nonce>`, the body under `<key>.<nonce>` in a bucket of its own. So
    reading every record stays cheap, and prompts cannot take the room that records need to change.
    Heavy parts are sealed: one that is damaged or missing is an error, never an empty one.
    """

    def __init__(
        self,
        bucket: KeyValue,
        bodies: KeyValue,
        nonce: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        self._bucket, self._bodies = bucket, bodies
        self._nonce = nonce

    def body_key(self, key: RequestKey) -> str:
        """A new key for a body, so that a body left by a crash is never mistaken for that of
        another request.
        """
        return f"{key}.{self._nonce()}"

    async def create(self, record: Record, body: Body) -> Stored | None:
        """Stores a new record; None if the key is taken (a duplicate). The body is stored first:
        the record commits. Where it does not, the body is deleted.

        Raises StoreFull if one of the two has no room: then neither is there. After a BusTimeout
        both may be, or the body alone: an orphan, which the sweep deletes.
        """
        value = _readable(_record, record)
        ttl_s = max(record.expires_unix_s - record.arrived_unix_s, 0.0) + ENDED_TTL_S
        try:
            heavy = sealed(_readable(_body, body))
            await self._bodies.create(record.body_key, heavy, ttl_s=ttl_s)
        except (WrongSequence, BusTimeout):
            # The key is ours alone, so a value there is this body.
            if await self._bodies.get(record.body_key) is None:
                raise
        try:
            return Stored(record, await self._bucket.create(f"s.{record.key}", value))
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
        """The body under a record's `body_key`; None if there is none (yet). Raises
        StoreDamaged.
        """
        entry = await self._bodies.get(key)
        return None if entry is None else _read(_body, key, opened(key, entry.value))

    async def change(
        self, key: RequestKey, step: Callable[[Record], Record | None]
    ) -> Stored | None:
        """Apply `step`, an event of shared/core/record.py, until its result is written. None if
        there is no record, or the event does not apply.

        A write whose answer is lost is recognised by reading it back. Raises BusTimeout if the
        store does not answer.
        """
        stored, output = await self.get(key), None
        for _ in range(RETRIES):
            changed = None if stored is None else step(stored.record)
            if stored is None or changed is None:
                await self._forget_output(output, stored)
                return None
            ttl_s = None
            if changed.verdict is not None:
                ttl_s = ENDED_TTL_S
                if output is None or output.resume != changed.resume:
                    await self._forget_output(output, stored)
                    output = await self._store_output(changed)
                changed = _naming(output, changed)
            try:
                revision = await self._bucket.update(
                    f"s.{key}", _readable(_record, changed), stored.revision, ttl_s=ttl_s
                )
                return Stored(changed, revision)
            except (WrongSequence, BusTimeout):
                before = stored
                stored = await self.get(key)
                if (
                    stored is not None
                    and stored.record == changed
                    and stored.revision != before.revision
                ):
                    return stored
        raise BusTimeout(f"the record of {key} kept changing")

    async def _store_output(self, record: Record) -> _Output:
        """Store the output under a new key; writing the record that names it commits. One without
        tokens is not stored: its key is empty.
        """
        if not record.resume.tokens:
            return _Output(record.resume, "")
        key = f"o.{record.key}.{self._nonce()}"
        output = sealed(_readable(_resume, record.resume))
        try:
            await self._bucket.create(key, output, ttl_s=OUTPUT_TTL_S)
        except (WrongSequence, BusTimeout):
            # The key is ours alone, so a value there is this output.
            if await self._bucket.get(key) is None:
                raise
        return _Output(record.resume, key)

    async def _forget_output(self, output: _Output | None, stored: Stored | None) -> None:
        """Delete an output that the record does not name. If the store does not answer, its TTL
        takes it.
        """
        named = "" if stored is None else stored.record.output_key
        if output is not None and output.key and output.key != named:
            with suppress(BusError):
                await self._bucket.delete(output.key)

    async def output(self, record: Record) -> Resume:
        """The output of an ended request, or of the earlier attempts of another. Raises
        StoreDamaged if it is not there whole.
        """
        if not record.output_key:
            return record.resume
        entry = await self._bucket.get(record.output_key)
        if entry is None:
            raise StoreDamaged(f"{record.output_key} is missing from the store")
        return _read(_resume, record.output_key, opened(record.output_key, entry.value))

    async def forget_body(self, key: str) -> None:
        """Delete the body under a record's `body_key`. If the store does not answer, it becomes an
        orphan, which the sweep deletes.
        """
        with suppress(BusError):
            await self._bodies.delete(key)

    async def bodies(self) -> Sequence[str]:
        """The keys of all bodies, also of those deleted a moment ago."""
        return await self._bodies.names()

    async def restore(self, ended: Record) -> Stored | None:
        """Store an ended record under a key whose record was deleted; None if the key is taken."""
        ended = _naming(await self._store_output(ended), ended)
        value = _readable(_record, ended)
        try:
            revision = await self._bucket.create(f"s.{ended.key}", value, ttl_s=ENDED_TTL_S)
        except WrongSequence:
            return None
        return Stored(ended, revision)

    async def open(self) -> Sequence[Stored]:
        """Every record without a verdict."""
        return (await self.listing()).open

    async def listing(self) -> Listing:
        found, others = list[Stored](), set[RequestKey]()
        for name, entry in await self._bucket.scan("s."):
            try:
                stored = _stored(name, entry)
            except StoreDamaged as error:
                log.warning("record.unreadable", key=name, error=error.message)
                others.add(RequestKey(name.removeprefix("s.")))
                continue
            if stored.record.verdict is None:
                found.append(stored)
            else:
                others.add(stored.record.key)
        return Listing(found, frozenset(others))


def _naming(output: _Output, record: Record) -> Record:
    """The record with the key of its output in the place of the output, where that was stored."""
    return without_output(record, output.key) if output.key else record


def _stored(name: str, entry: Entry) -> Stored:
    """The record under this name. Raises StoreDamaged if no service of ours can have written it."""
    record = _read(_record, name, entry.value)
    if name != f"s.{record.key}":
        raise StoreDamaged(f"{name} has the record of another key")
    return Stored(record, entry.revision)


def _readable(decoder: msgspec.msgpack.Decoder[T], value: T) -> bytes:
    """The bytes of a value, after they have been read again: what nobody can read is not stored.
    Raises PeerError.
    """
    stored = _encode(value)
    try:
        decoder.decode(stored)
    except msgspec.MsgspecError as error:
        name = type(value).__name__
        raise PeerError(
            f"the {name} could not be read again: {error}", code="unreadable"
        ) from error
    return stored


def _read(decoder: msgspec.msgpack.Decoder[T], key: str, value: bytes) -> T:
    """Decode a value. Raises StoreDamaged if no service of ours can have written it."""
    try:
        return decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise StoreDamaged(f"{key} cannot be read: {error}") from error
