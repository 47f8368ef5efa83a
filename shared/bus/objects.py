"""NATS's object store over its stream, without consumers: `nats object` reads what this writes.

An object is chunks under `$O.<bucket>.C.<chunks>` and, once whole, an entry under
`$O.<bucket>.M.<name in base 64>`; a copy under `$O.<bucket>.I.<name>` finds names that begin alike.
An object's chunks have one writer, which appends with the expected last sequence.
"""

from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from shared.bus.jetstream import Stream, sequence, ttl_headers
from shared.errors import UNDECODABLE, PeerError, StoreDamaged
from shared.subjects import ID_PATTERN


class Digest:
    """The size and the digest of chunks, as they are appended one after the other."""

    def __init__(self) -> None:
        self.size_bytes = self.chunks = 0
        self._sha = sha256()

    def take(self, chunk: bytes) -> None:
        self.size_bytes += len(chunk)
        self.chunks += 1
        self._sha.update(chunk)

    @property
    def text(self) -> str:
        return f"SHA-256={urlsafe_b64encode(self._sha.digest()).decode()}"


class ObjectInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The entry of a whole object; names of fields are NATS's."""

    name: str
    bucket: str
    nuid: str  # the name of its chunks
    size: int = 0  # bytes
    chunks: int = 0
    digest: str = ""
    mtime: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    deleted: bool = False


class Chunk(NamedTuple):
    seq: int
    payload: bytes


_infos = msgspec.json.Decoder(ObjectInfo)


class Objects:
    """One bucket of objects. Names are checked ids joined by dots; those of chunks are ids."""

    def __init__(self, stream: Stream, bucket: str) -> None:
        self._stream, self._bucket = stream, bucket
        self._chunks, self._entries = f"$O.{bucket}.C.", f"$O.{bucket}.M."
        self._index = f"$O.{bucket}.I."

    async def append(
        self, chunks: str, payload: bytes, expected_last: int, *, ttl_s: float | None = None
    ) -> int:
        """Append a chunk and return its sequence. Raises WrongSequence unless the last of these
        chunks is `expected_last` (0: there is none), StoreFull, BusTimeout.
        """
        subject = self._chunks_subject(chunks)
        return await self._stream.write(subject, payload, ttl_headers(ttl_s), expected_last)

    async def last(self, chunks: str) -> Chunk | None:
        msg = await self._stream.last(self._chunks_subject(chunks))
        return None if msg is None else Chunk(sequence(msg), msg.data)

    async def read(self, chunks: str) -> AsyncIterator[Chunk]:
        """The chunks in their order; only some megabytes of them are in memory at a time."""
        async for msgs in self._stream.since(self._chunks_subject(chunks), 1):
            for msg in msgs:
                yield Chunk(sequence(msg), msg.data)

    async def commit(
        self,
        name: str,
        chunks: str,
        digest: Digest,
        metadata: Mapping[str, str],
        *,
        ttl_s: float | None = None,
    ) -> ObjectInfo:
        """Make an object of these chunks, all of which the caller has appended."""
        info = ObjectInfo(
            name=name,
            bucket=self._bucket,
            nuid=chunks,
            size=digest.size_bytes,
            chunks=digest.chunks,
            digest=digest.text,
            mtime=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            metadata=dict(metadata),
        )
        await self._write(self._index + name, info, ttl_s)
        await self._write(self._entry(name), info, ttl_s)
        return info

    async def unindex(self, name: str) -> None:
        await self._stream.purge(self._index + name)

    async def _write(self, subject: str, info: ObjectInfo, ttl_s: float | None) -> None:
        headers = {"Nats-Rollup": "sub", **ttl_headers(ttl_s)}
        await self._stream.write(subject, msgspec.json.encode(info), headers)

    async def info(self, name: str) -> ObjectInfo | None:
        """The object of this name. Raises StoreDamaged."""
        msg = await self._stream.last(self._entry(name))
        return None if msg is None else _info(msg.data)

    async def all(self) -> list[ObjectInfo]:
        """All objects. Raises StoreDamaged."""
        return await self._infos(f"{self._entries}>")

    async def named(self, prefix: str = "") -> list[ObjectInfo]:
        """Objects whose names begin with `prefix`: whole parts, each with its dot. Some may never
        have been completed, or may be about to be deleted. Raises StoreDamaged.
        """
        return await self._infos(f"{self._index}{prefix}>")

    async def _infos(self, subject: str) -> list[ObjectInfo]:
        return [
            info
            async for msgs in self._stream.since(subject, 1)
            for msg in msgs
            if (info := _info(msg.data)) is not None
        ]

    async def delete(self, info: ObjectInfo) -> None:
        """Remove an object: first its entry."""
        await self._stream.purge(self._entry(info.name))
        await self.unindex(info.name)
        await self.purge(info.nuid)

    async def purge(self, chunks: str) -> None:
        await self._stream.purge(self._chunks_subject(chunks))

    async def stored_chunks(self) -> list[str]:
        """The names of all chunks, those of whole objects and those without one."""
        skip = len(self._chunks)
        return [s[skip:] for s in await self._stream.subjects() if s.startswith(self._chunks)]

    def _chunks_subject(self, chunks: str) -> str:
        if not ID_PATTERN.fullmatch(chunks):
            raise PeerError(f"{chunks!r} names no chunks", code="invalid_id")
        return self._chunks + chunks

    def _entry(self, name: str) -> str:
        return self._entries + urlsafe_b64encode(name.encode()).decode()


def _info(raw: bytes) -> ObjectInfo | None:
    if not raw:  # the marker of an entry that has expired
        return None
    try:
        info = _infos.decode(raw)
    except UNDECODABLE as error:
        raise StoreDamaged(f"the entry of an object is damaged: {error}") from error
    return None if info.deleted else info
