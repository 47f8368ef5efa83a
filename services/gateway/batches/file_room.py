"""Limits each tenant's room for files: stored files, and the bytes of new ones that arrived."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.batches.file_store import FileStore


class _Tenant:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # while its stored files are counted, or become one more
        self.stored_bytes = self.coming_bytes = self.uploads = 0
        self.stored_files = self.coming_files = 0


class Share:
    """One upload's part of the room."""

    def __init__(self, tenant: _Tenant, limit_bytes: int, limit_files: int) -> None:
        self._tenant, self._limit, self._limit_files = tenant, limit_bytes, limit_files
        self._bytes, self._files = 0, 1
        tenant.coming_files += 1

    def take(self, size_bytes: int) -> bool:
        """Take `size_bytes` more. False: there is no room for them, or for one more file."""
        tenant = self._tenant
        if tenant.stored_files + tenant.coming_files > self._limit_files:
            return False
        if tenant.stored_bytes + tenant.coming_bytes + size_bytes > self._limit:
            return False
        tenant.coming_bytes += size_bytes
        self._bytes += size_bytes
        return True

    def give_back(self) -> None:
        self._tenant.coming_bytes -= self._bytes
        self._tenant.coming_files -= self._files
        self._bytes = self._files = 0

    @asynccontextmanager
    async def becoming_a_file(self) -> AsyncIterator[None]:
        """The upload is made a file in here. It counts even if that fails: it may be there."""
        async with self._tenant.lock:
            self._tenant.stored_bytes += self._bytes
            self._tenant.stored_files += 1
            self.give_back()
            yield


class FileRoom:
    """The room of all tenants. Uploads at other gateways count once they are files."""

    def __init__(self, store: FileStore, limit_bytes: int, limit_files: int) -> None:
        self._store, self._limits = store, (limit_bytes, limit_files)
        self._tenants: dict[str, _Tenant] = {}  # of uploads under way

    @asynccontextmanager
    async def upload(self, name: str) -> AsyncIterator[Share]:
        """An upload of this tenant's. Raises BusError, PeerError."""
        tenant = self._tenants.setdefault(name, _Tenant())
        share = Share(tenant, *self._limits)
        tenant.uploads += 1
        try:
            async with tenant.lock:
                files = await self._store.of_tenant(name)
                tenant.stored_bytes = sum(file.bytes for file in files)
                tenant.stored_files = len(files)
            yield share
        finally:
            share.give_back()
            tenant.uploads -= 1
            if not tenant.uploads:
                del self._tenants[name]
