"""Stores batch records: `o.<tenant>.<batch>` while open, then `e.<tenant>.<batch>` for a month."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from services.gateway.batches.file_store import MONTH_S
from services.gateway.batches.record import BatchRecord
from shared.bus.api import Entry, KeyValue
from shared.errors import UNDECODABLE, BusTimeout, PeerError, WrongSequence
from shared.process import logs
from shared.subjects import ID_PATTERN

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BatchRecord).decode
TRIES = 8
log = logs.logger()


class BatchStore:
    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    async def create(self, record: BatchRecord) -> bool:
        """Store a new batch; False if one has its id. Raises BusError."""
        if await self._bucket.get(f"e.{_key(record)}") is not None:
            return False
        try:
            await self._bucket.create(f"o.{_key(record)}", _encode(record))
        except WrongSequence:
            return False
        return True

    async def get(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """The batch. Raises BusError, PeerError for a damaged record."""
        if not ID_PATTERN.fullmatch(batch_id):
            return None
        # an end is stored before the open record is deleted
        for state in ("o", "e"):
            entry = await self._bucket.get(f"{state}.{tenant}.{batch_id}")
            if entry is not None:
                return _read(entry.value)
        return None

    async def change(
        self, record: BatchRecord, step: Callable[[BatchRecord], BatchRecord | None]
    ) -> BatchRecord:
        """The record after `step`; as it is where that gives None. Raises BusError, PeerError."""
        key = _key(record)
        for _ in range(TRIES):
            entry = await self._bucket.get(f"o.{key}")
            if entry is None:
                ended = await self.get(record.tenant, record.id)
                if ended is None:
                    raise PeerError(f"the batch {record.id} is gone", code="not_found")
                return ended
            present = _read(entry.value)
            after = step(present)
            if after is None:
                return present
            try:
                if after.open:
                    await self._bucket.update(f"o.{key}", _encode(after), entry.revision)
                else:
                    await self._end(key, after, entry.revision)
            except WrongSequence:
                continue
            return after
        raise BusTimeout(f"the batch {record.id} changes too often")

    async def open(self, tenant: str = "") -> list[BatchRecord]:
        """The batches of a tenant, or of all, that are open or ended just now, the oldest first."""
        found = _readable(await self._bucket.scan(f"o.{tenant}." if tenant else "o."))
        return sorted(found, key=lambda r: (r.created_at, r.id))

    async def of_tenant(self, tenant: str) -> list[BatchRecord]:
        """The batches of a tenant, the newest first."""
        found: dict[str, BatchRecord] = {}
        for state in ("o", "e"):
            for record in _readable(await self._bucket.scan(f"{state}.{tenant}.")):
                found[record.id] = record
        return sorted(found.values(), key=lambda r: (r.created_at, r.id), reverse=True)

    async def _end(self, key: str, record: BatchRecord, revision: int) -> None:
        """Write the end into the open record, which decides, then move it to the ended ones."""
        await self._bucket.update(f"o.{key}", _encode(record), revision)
        await self.tidy(record)

    async def tidy(self, record: BatchRecord) -> None:
        """Move a record that has ended out of the open ones. Raises BusError."""
        key = _key(record)
        with suppress(WrongSequence):  # an earlier try
            await self._bucket.create(f"e.{key}", _encode(record), ttl_s=MONTH_S)
        await self._bucket.delete(f"o.{key}")


def _key(record: BatchRecord) -> str:
    return f"{record.tenant}.{record.id}"


def _readable(entries: Sequence[tuple[str, Entry]]) -> list[BatchRecord]:
    """The records in these entries; a damaged one is logged and left out."""
    found = []
    for key, entry in entries:
        try:
            found.append(_read(entry.value))
        except PeerError as error:
            log.error("batch.damaged", key=key, error=error.message)
    return found


def _read(raw: bytes) -> BatchRecord:
    try:
        return _decode(raw)
    except UNDECODABLE as error:
        raise PeerError(
            f"the record of a batch is damaged: {error}", code="server_error"
        ) from error
