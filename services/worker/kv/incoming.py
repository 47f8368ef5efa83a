"""Fetches KV from another worker into the engine, block by block."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import structlog

from services.worker.engine import KvFacts, KvName
from services.worker.engines.shelf import HEAD_BYTES, Shelf, open_shelf
from services.worker.kv.link import Link
from services.worker.kv.turns import EngineTurns, Rows, to_its_end
from services.worker.kv.wire import (
    MOST_BLOCKS,
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
    connect,
)
from shared.errors import PeerError

log = structlog.get_logger()

ROUNDS = 3  # the most connections of a fetch: what was damaged or broken off is asked for again


@dataclass
class Here:
    """The parts of this worker that a fetch uses."""

    replica: str
    facts: KvFacts
    turns: EngineTurns
    shelf: Shelf
    rows: Rows
    link: Link
    pool: Executor


class How(Enum):
    """The end of a connection."""

    DONE = "done"
    DAMAGED = "damaged"
    LOST = "lost"
    USELESS = "useless"  # refused, or there is no room here


@dataclass
class Fetching:
    """One text on its way here. `hurry` is set when no block is waited for any more that is yet to
    be computed; after `until_s` by the loop's clock, nothing is.
    """

    here: Here
    address: str
    until_s: float
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    _deadline: asyncio.Timeout | None = None

    async def run(self, tokens: Sequence[int], salt: bytes) -> int:
        """The positions of the text that are here, from the first on. Raises EngineError."""
        loop = asyncio.get_running_loop()
        for _ in range(ROUNDS):
            lacking = await self.here.turns.look(tokens, salt)
            if not lacking.names or loop.time() >= self.until_s:
                return lacking.tokens
            how = await self._connect(lacking.names[:MOST_BLOCKS])
            if how in (How.DONE, How.USELESS):
                break
        return (await self.here.turns.look(tokens, salt)).tokens

    def until(self, until_s: float) -> None:
        """It ends then, and waits for nothing that is yet to be computed."""
        self.until_s = until_s
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(until_s)
        self.hurry.set()

    async def _connect(self, names: Sequence[KvName]) -> How:
        bringing, how = Bringing(self.here), How.LOST
        loop, measured = asyncio.get_running_loop(), self.hurry.is_set()
        began_s = loop.time()
        try:
            async with asyncio.timeout_at(self.until_s) as self._deadline:
                how = await self._converse(names, bringing)
        except (OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            log.info("kv.peer_lost", address=self.address, error=reason)
        except PeerError as error:
            log.warning("kv.bad_message", address=self.address, error=error.message)
        finally:
            self._deadline = None
            await bringing.end()
        if bringing.damaged:
            log.warning("kv.damaged", address=self.address)
        elif measured and bringing.blocks:
            count = bringing.blocks * self.here.facts.block_bytes
            self.here.link.came(count, loop.time() - began_s)
        if bringing.full:
            return How.USELESS
        return How.DAMAGED if bringing.damaged and how is How.DONE else how

    async def _converse(self, names: Sequence[KvName], bringing: "Bringing") -> How:
        here, waits = self.here, not self.hurry.is_set()
        wire = await connect(self.address)
        shelf, hurrying = -1, None
        try:
            digests = [name.digest for name in names]
            ask = Ask(layout=here.facts.layout, replica=here.replica, digests=digests, waits=waits)
            await wire.send(ask)
            answer: Welcome | Refused = await wire.read(Welcome | Refused)
            if isinstance(answer, Refused):
                log.warning("kv.refused", address=self.address, reason=answer.reason)
                return How.USELESS
            with suppress(OSError):  # it is on another host
                shelf = open_shelf(answer.shelf)
            await wire.send(Go(shelf >= 0))
            if waits:
                hurrying = asyncio.create_task(self._hurry(wire))
            while not isinstance(blocks := await wire.read(Blocks | End, None), End):
                if not 0 < len(blocks.numbers) == len(blocks.checks) == len(blocks.rows):
                    raise PeerError("blocks without their digests or rows")
                if max(blocks.numbers) >= len(names):
                    raise PeerError("blocks that nobody asked for")
                await self._receive(wire, shelf, blocks, names, bringing)
                if bringing.full:
                    break
            return How.DONE
        finally:
            if hurrying is not None:
                hurrying.cancel()
            wire.close()
            if shelf >= 0:
                os.close(shelf)

    async def _hurry(self, wire: Wire) -> None:
        await self.hurry.wait()
        with suppress(OSError, TimeoutError):  # the reader notices it, too
            await wire.send(Hurry())

    async def _receive(
        self, wire: Wire, shelf: int, blocks: Blocks, names: Sequence[KvName], bringing: "Bringing"
    ) -> None:
        here, loop, done = self.here, asyncio.get_running_loop(), 0
        await here.link.pretend(len(blocks.numbers) * here.facts.block_tokens)
        while done < len(blocks.numbers):
            left = len(blocks.numbers) - done
            rows = await here.rows.some(1 if shelf < 0 else left)
            views = [here.shelf.row(row) for row in rows]
            try:
                if shelf < 0:
                    await wire.read_into(views[0])
                else:
                    at = blocks.rows[done : done + len(rows)]
                    await to_its_end(loop.run_in_executor(here.pool, _copy, shelf, at, views))
            except BaseException:
                here.rows.give(rows)
                raise
            for row in rows:
                bringing.add(Came(names[blocks.numbers[done]], blocks.checks[done], row))
                done += 1
        if shelf >= 0:
            await wire.send(Taken(list(blocks.rows)))


class Came(NamedTuple):
    """A block that lies in a row, and the digest that its bytes should have."""

    name: KvName
    check: bytes
    row: int


class Bringing:
    """Brings blocks that have come into the engine, as it has turns for them. Those that are not as
    they were are dropped.
    """

    def __init__(self, here: Here) -> None:
        self._here = here
        self._came: asyncio.Queue[Came | None] = asyncio.Queue()  # as many as there are rows
        self.full = self.damaged = False
        self.blocks = 0
        self._task = asyncio.create_task(self._run(), name="worker.kv.bring")

    def add(self, block: Came) -> None:
        self._came.put_nowait(block)

    async def end(self) -> None:
        """Bring in what is left. Raises EngineError."""
        self._came.put_nowait(None)
        await to_its_end(self._task)

    async def _run(self) -> None:
        more = True
        while more:
            batch = list[Came]()
            block = await self._came.get()
            while block is not None:
                batch.append(block)
                if len(batch) == self._here.turns.most or self._came.empty():
                    break
                block = self._came.get_nowait()
            more = block is not None
            if not batch:
                break
            try:
                if not self.full:
                    await self._bring(batch)
            finally:
                self._here.rows.give([each.row for each in batch])

    async def _bring(self, batch: Sequence[Came]) -> None:
        here, loop = self._here, asyncio.get_running_loop()
        views = [here.shelf.row(each.row) for each in batch]
        checks = await loop.run_in_executor(here.pool, checks_of, views)
        good = [each for each, check in zip(batch, checks, strict=True) if each.check == check]
        self.damaged |= len(good) < len(batch)
        there = await here.turns.bring_in([x.name for x in good], [x.row for x in good])
        self.blocks += sum(there)
        self.full = not all(there)


def _copy(shelf: int, at: Sequence[int], views: Sequence[memoryview]) -> None:
    """Read these rows of a peer's shelf."""
    for row, view in zip(at, views, strict=True):
        os.preadv(shelf, [view], HEAD_BYTES + row * len(view))
