"""Bounds the lines of batches that are under way, by number and bytes; others wait in order."""

import asyncio


class BatchRoom:
    def __init__(self, requests: int, size_bytes: int) -> None:
        self._requests, self._bytes = requests, size_bytes
        self._used_requests = self._used_bytes = 0
        self._turn = asyncio.Lock()  # of those who wait, in their order
        self._freed = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Wait until a line of this size fits; one over the bound waits to be the only one."""
        async with self._turn:
            while self._used_requests and (
                self._used_requests >= self._requests or self._used_bytes + size_bytes > self._bytes
            ):
                self._freed.clear()
                await self._freed.wait()
            self._used_requests += 1
            self._used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        self._used_requests -= 1
        self._used_bytes -= size_bytes
        self._freed.set()
