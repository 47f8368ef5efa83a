"""Gives KV to other workers, block by block: by TCP, or by the shelf where they can open it."""

import asyncio
import socket
from collections import Counter
from concurrent.futures import Executor

import structlog

from services.worker.engines.shelf import Shelf
from services.worker.kv.outgoing import Outgoing, Pump, Ready
from services.worker.kv.wire import (
    MOST_OF_A_MESSAGE,
    Ask,
    Blocks,
    End,
    Go,
    Hurry,
    Refused,
    Taken,
    Welcome,
    Wire,
    checks_of,
)
from shared.errors import PeerError

log = structlog.get_logger()

MOST_CONNECTIONS = 128
ACCEPT_AGAIN_S = 0.1
MOST_OF_A_PEER = 32
LONGEST_S = 120.0  # of a connection: a block may be yet to be computed, or a reader be stopped


class KvServer:
    """Serves one shelf. `layout`: as in KvFacts."""

    def __init__(self, pump: Pump, shelf: Shelf, layout: str, pool: Executor) -> None:
        self._pump, self._shelf, self._layout, self._pool = pump, shelf, layout, pool
        self._peers = Counter[str]()
        self._open = 0

    async def run(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listening)
                except OSError as error:  # no descriptor is free, or the peer has gone already
                    log.warning("kv.not_accepted", error=str(error))
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                if self._open == MOST_CONNECTIONS:
                    sock.close()
                    continue
                self._open += 1
                tasks.create_task(self._serve(sock), name="worker.kv.serve")

    async def _serve(self, sock: socket.socket) -> None:
        peer = ""
        try:
            wire = Wire(sock)
            ask: Ask = await wire.read(Ask)
            if reason := self._refusal(ask):
                await wire.send(Refused(reason))
                return
            peer = ask.replica
            self._peers[peer] += 1
            await wire.send(Welcome(self._shelf.at))
            go: Go = await wire.read(Go)
            outgoing = Outgoing(ask.digests, ask.waits)
            self._pump.add(outgoing)
            try:
                if ask.probe:
                    await self._probe(wire, outgoing, ask.probe)
                else:
                    await self._give(wire, outgoing, go.shared)
            finally:
                self._pump.remove(outgoing)
        except (OSError, TimeoutError) as error:
            log.info("kv.peer_lost", peer=peer, error=str(error) or type(error).__name__)
        except PeerError as error:
            log.warning("kv.bad_message", peer=peer, error=error.message)
        finally:
            sock.close()
            self._open -= 1
            if peer:
                self._peers[peer] -= 1
                self._peers += Counter()  # forgets those at 0

    def _refusal(self, ask: Ask) -> str:
        if ask.layout != self._layout:
            return "another model, type of numbers or size of blocks"
        if self._peers[ask.replica] >= MOST_OF_A_PEER:
            return "too many connections"
        return ""

    async def _give(self, wire: Wire, ask: Outgoing, shared: bool) -> None:
        """Until all is given, and read. The reader's messages come beside."""
        listening = asyncio.create_task(self._listen(wire, ask))
        sending = asyncio.create_task(self._send(wire, ask, shared))
        try:
            async with asyncio.timeout(LONGEST_S):
                await asyncio.wait((listening, sending), return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                    if shared:  # the rows are lent until the peer leaves
                        await asyncio.wait((listening,))
        finally:
            for task in (listening, sending):
                task.cancel()
            await asyncio.gather(listening, sending, return_exceptions=True)

    async def _listen(self, wire: Wire, ask: Outgoing) -> None:
        while True:
            match await wire.read(Taken | Hurry, None):
                case Taken(rows):
                    self._pump.give(ask, rows)
                case Hurry():
                    self._pump.hurry(ask)

    async def _send(self, wire: Wire, ask: Outgoing, shared: bool) -> None:
        loop, more = asyncio.get_running_loop(), True
        while more:
            batch = list[Ready]()
            block = await ask.ready.get()
            while block is not None:
                batch.append(block)
                if len(batch) == MOST_OF_A_MESSAGE or ask.ready.empty():
                    break
                block = ask.ready.get_nowait()
            more = block is not None
            if not batch:
                break
            rows = [each.row for each in batch]
            views = [self._shelf.row(row) for row in rows]
            checks = await loop.run_in_executor(self._pool, checks_of, views)
            blocks = Blocks([each.number for each in batch], checks, rows)
            await wire.send(blocks, () if shared else views)
            if not shared:
                self._pump.give(ask, rows)
        await wire.send(End())

    async def _probe(self, wire: Wire, ask: Outgoing, count: int) -> None:
        rows = self._pump.some(count)
        ask.rows.update(rows)  # given back with it
        views = [self._shelf.row(row) for row in rows]
        for view in views:  # whoever measures is entitled to nobody's KV
            view[:] = bytes(len(view))
        checks = await asyncio.get_running_loop().run_in_executor(self._pool, checks_of, views)
        await wire.send(Blocks(list(range(len(rows))), checks, rows), views)
        await wire.send(End())
