"""Stores the files of tenants: objects of the bucket `files`, whose chunks are written before the
object is there. A file has its tenant in its name, so no tenant reads another's files.
"""

import time
from collections.abc import AsyncIterator
from uuid import uuid4

from msgspec import Struct

from shared import subjects
from shared.bus.objects import Digest, ObjectInfo, Objects
from shared.errors import PeerError

CHUNK_BYTES = 128 * 1024
MONTH_S = 30 * 86_400
# chunks outlive the entry that names them
CHUNKS_EXTRA_S = 2 * 86_400


class FileObject(Struct, frozen=True, kw_only=True):
    """A file as OpenAI's API shows it."""

    id: str
    bytes: int
    created_at: int  # unix seconds
    filename: str
    purpose: str
    expires_at: int | None = None
    object: str = "file"
    status: str = "processed"


class Incoming:
    """A file that arrives. `commit` makes it one; without that it never was."""

    def __init__(self, store: "FileStore", file_id: str) -> None:
        self.id = file_id
        self.digest = Digest()
        self._store = store
        self._kept = bytearray()
        self._last = 0

    async def take(self, data: bytes, ttl_s: float) -> None:
        """Store the next bytes of the file. Raises StoreFull, BusTimeout."""
        self._kept += data
        while len(self._kept) >= CHUNK_BYTES:
            await self._append(bytes(self._kept[:CHUNK_BYTES]), ttl_s)
            del self._kept[:CHUNK_BYTES]

    async def finish(self, ttl_s: float) -> None:
        if self._kept:
            await self._append(bytes(self._kept), ttl_s)
            self._kept.clear()

    async def _append(self, chunk: bytes, ttl_s: float) -> None:
        objects = self._store.objects
        self._last = await objects.append(self.id, chunk, self._last, ttl_s=ttl_s + CHUNKS_EXTRA_S)
        self.digest.take(chunk)


class FileStore:
    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def incoming(self) -> Incoming:
        return Incoming(self, f"file-{uuid4().hex}")

    async def commit(
        self, tenant: str, file_id: str, digest: Digest, *, filename: str, purpose: str, keep_s: int
    ) -> FileObject:
        """Make stored chunks a file of the tenant, kept for `keep_s`. Raises BusError."""
        now = int(time.time())
        metadata = {
            "filename": filename,
            "purpose": purpose,
            "created_at": str(now),
            "expires_at": str(now + keep_s),
        }
        info = await self.objects.commit(
            _name(tenant, file_id), file_id, digest, metadata, ttl_s=keep_s
        )
        return _shown(info)

    async def find(self, tenant: str, file_id: str) -> ObjectInfo:
        """Raises PeerError if the tenant has no such file."""
        if subjects.ID_PATTERN.fullmatch(file_id):
            info = await self.objects.info(_name(tenant, file_id))
            if info is not None:
                return info
        raise PeerError("no such file", code="not_found", param="file_id")

    async def shown(self, tenant: str, file_id: str) -> FileObject:
        return _shown(await self.find(tenant, file_id))

    async def of_tenant(self, tenant: str) -> list[FileObject]:
        """The tenant's files, the newest first."""
        found = await self.objects.named(f"{tenant}.")
        return sorted(map(_shown, found), key=lambda f: (f.created_at, f.id), reverse=True)

    async def content(self, info: ObjectInfo) -> AsyncIterator[bytes]:
        async for chunk in self.objects.read(info.nuid):
            yield chunk.payload


def _name(tenant: str, file_id: str) -> str:
    return f"{tenant}.{file_id}"


def _shown(info: ObjectInfo) -> FileObject:
    said = info.metadata
    return FileObject(
        id=info.name.partition(".")[2],
        bytes=info.size,
        created_at=int(said.get("created_at", "0")),
        expires_at=int(said["expires_at"]) if "expires_at" in said else None,
        filename=said.get("filename", ""),
        purpose=said.get("purpose", ""),
    )
