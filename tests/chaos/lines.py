"""TCP proxies that hold, slow and cut what passes: the network between the processes of a fleet.

A line listens on a port of its own and passes everything on to one server. It knows the process at
the other end of each connection from the kernel, so a fault can be that of one process. While a
process is held, nothing reaches it and nothing of it arrives, and no connection ends: a partition.
Afterwards everything arrives, in order, as after a retransmission. Network namespaces would need
root, and a kernel with netem for delays; this needs neither.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Self

from loadgen.fleet.ports import HOST
from tests.fleet.processes import owner_of_port

CHUNK_BYTES = 65_536
QUEUED = 1024  # chunks under way

Sent = asyncio.Queue[tuple[float, bytes]]  # when each chunk arrives, at the earliest


class Lines:
    """All lines of a fleet, and the faults of the moment, by process id."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._joins: list[asyncio.Task[None]] = []
        self._held: set[int] = set()
        self._delay_s: dict[int, float] = {}
        self._writers: dict[asyncio.StreamWriter, set[int]] = {}  # with both processes
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for join in self._joins:
            join.cancel()
        await asyncio.gather(*self._joins, return_exceptions=True)

    async def add(self, port: int) -> int:
        """Open a line to the server at `port`. Returns the port at which the line listens."""

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._joins.append(asyncio.create_task(self._join(reader, writer, port)))

        server = await asyncio.start_server(connected, HOST, 0)
        self._servers.append(server)
        own: int = server.sockets[0].getsockname()[1]
        return own

    @contextlib.contextmanager
    def holding(self, *pids: int) -> Iterator[None]:
        """Let nothing pass to or from these processes."""
        self._held.update(pids)
        try:
            yield
        finally:
            self._held.difference_update(pids)
            self._changed.set()
            self._changed = asyncio.Event()

    @contextlib.contextmanager
    def delaying(self, by_s: float, *pids: int) -> Iterator[None]:
        """Let everything to and from these processes take `by_s` longer."""
        self._delay_s.update(dict.fromkeys(pids, by_s))
        try:
            yield
        finally:
            for pid in pids:
                del self._delay_s[pid]

    def cut(self, pid: int) -> None:
        """Reset every connection of this process."""
        for writer, ends in list(self._writers.items()):
            if pid in ends:
                writer.transport.abort()

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, port)
        except OSError:
            writer.transport.abort()
            return
        ends = {owner_of_port(writer.get_extra_info("peername")[1]), owner_of_port(port)}
        self._writers.update({writer: ends, far_writer: ends})
        there: Sent = asyncio.Queue(QUEUED)
        back: Sent = asyncio.Queue(QUEUED)
        delivering = [
            asyncio.create_task(self._deliver(there, far_writer, ends)),
            asyncio.create_task(self._deliver(back, writer, ends)),
        ]
        reading = [
            asyncio.create_task(self._read(reader, there, ends)),
            asyncio.create_task(self._read(far_reader, back, ends)),
        ]
        try:
            # where one direction has ended, so has the other
            await asyncio.wait(delivering, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*delivering, *reading):
                task.cancel()
            await asyncio.gather(*delivering, *reading, return_exceptions=True)
            for one in (writer, far_writer):
                del self._writers[one]
                one.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, sent: Sent, ends: set[int]) -> None:
        now_s, data = asyncio.get_running_loop().time, b"?"
        while data:
            try:
                data = await reader.read(CHUNK_BYTES)
            except OSError:
                data = b""
            await sent.put((now_s() + max(self._delay_s.get(end, 0.0) for end in ends), data))

    async def _deliver(self, sent: Sent, writer: asyncio.StreamWriter, ends: set[int]) -> None:
        """Deliver what was sent, until an end of the connection has gone."""
        now_s = asyncio.get_running_loop().time
        while True:
            at_s, data = await sent.get()
            await asyncio.sleep(at_s - now_s())
            while self._held & ends:
                await self._changed.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()
