"""A bound on what is under way, in requests and in bytes; who waits is served in order."""

import asyncio


class BatchRoom:
    def __init__(self, requests: int, size_bytes: int) -> None:
        self._requests, self._bytes = requests, size_bytes
        self._used_requests = self._used_bytes = 0
        self._turn = asyncio.Lock()  # of those who wait, in their order
        self._freed = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Wait until one fits; what is larger than all waits until nothing else is under way."""
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
