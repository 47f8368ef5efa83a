"""A TCP proxy that stands for another host between two workers: the shelf that it tells of is not
to be found, and the way may be slow, break off, stop, or damage a byte.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from services.worker.kv.wire import Welcome
from services.worker.line import LENGTH, framed

PART = 4096


class Far:
    """`address` leads to another. All limits count the bytes to the one who fetches: `rate` per
    second, `cut` and `stop` after so many of a connection, `damaged` is the one that is changed.
    """

    def __init__(self, address: str) -> None:
        self._to, self.address = address.rpartition(":"), ""
        self.rate: float | None = None
        self.cut: int | None = None
        self.stop: int | None = None
        self.damaged: int | None = None
        self.passed: list[int] = []  # by connection
        self.stopped = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks = []
        try:
            back, to = await asyncio.open_connection(self._to[0], int(self._to[2]))
            tasks = [
                asyncio.create_task(self._there(reader, to)),
                asyncio.create_task(self._back(back, writer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()
            if tasks:
                to.close()

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(PART):
            writer.write(part)
            await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        answer = await reader.readexactly(size)
        with suppress(msgspec.ValidationError):  # it refuses
            welcome = msgspec.msgpack.decode(answer, type=Welcome)
            shelf = msgspec.structs.replace(welcome.shelf, nonce=bytes(16))
            answer = msgspec.msgpack.encode(Welcome(shelf))
        writer.write(framed(answer))
        number, at = len(self.passed), 0
        self.passed.append(0)
        while part := bytearray(await reader.read(PART)):
            for limit in (self.cut, self.stop):
                if limit is not None:
                    del part[max(0, limit - at) :]
            if self.damaged is not None and at <= self.damaged < at + len(part):
                part[self.damaged - at] ^= 1
                self.damaged = None
            if self.rate is not None:
                await asyncio.sleep(len(part) / self.rate)
            writer.write(part)
            await writer.drain()
            at += len(part)
            self.passed[number] = at
            if at == self.cut:
                return
            if at == self.stop:
                self.stopped.set()
                await asyncio.Event().wait()


@asynccontextmanager
async def far(address: str) -> AsyncIterator[Far]:
    proxy = Far(address)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.address = f"{host}:{port}"
    async with server:
        yield proxy
