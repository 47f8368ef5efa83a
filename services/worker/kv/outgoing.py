"""Takes blocks out of the engine for all who asked, in turn, onto rows of the shelf."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.worker.kv.turns import EngineTurns

PARTS = 4  # of the rows: an ask has one part at most on its way


class Ready(NamedTuple):
    """A block that lies on the shelf, by its number in the ask."""

    number: int
    row: int


class Outgoing:
    """The blocks of one ask. `ready` ends with None."""

    def __init__(self, digests: Sequence[bytes], waits: bool) -> None:
        self.pending = deque(enumerate(digests))
        self.waits = waits
        self.dry = False  # nothing more is there before the next step
        self.tries = 1 << 30  # blocks to ask the engine for at once
        self.rows: set[int] = set()  # that it has
        self.ready: asyncio.Queue[Ready | None] = asyncio.Queue()  # no more than it has rows
        self.gone = False


class Pump:
    """Fills the rows for all asks, a call of the engine at a time. An ask that waits for blocks to
    be computed is tried again after each step, for one block until it gets one.
    """

    def __init__(self, turns: EngineTurns, rows: Iterable[int]) -> None:
        self._turns, self._free = turns, list(rows)
        self._most_rows = max(1, len(self._free) // PARTS)
        self._asks: deque[Outgoing] = deque()
        self._news = asyncio.Event()

    @property
    def free(self) -> int:
        """The number of free rows."""
        return len(self._free)

    def add(self, ask: Outgoing) -> None:
        self._asks.append(ask)
        if not ask.pending:
            ask.ready.put_nowait(None)
        self._news.set()

    def hurry(self, ask: Outgoing) -> None:
        """It waits no more."""
        ask.waits = ask.dry = False
        ask.tries = 1 << 30
        self._news.set()

    def remove(self, ask: Outgoing) -> None:
        """Its rows are free, but for those of a call under way, which are then."""
        ask.gone = True
        self._asks.remove(ask)
        self.give(ask, list(ask.rows))

    def give(self, ask: Outgoing, rows: Iterable[int]) -> None:
        """The ask is done with these rows. Those that it has not are none of its business."""
        for row in rows:
            if row in ask.rows:
                ask.rows.discard(row)
                self._free.append(row)
        self._news.set()

    def some(self, count: int) -> list[int]:
        """So many free rows at most, to measure the link with."""
        taken = self._free[-min(count, self._most_rows) :]
        del self._free[len(self._free) - len(taken) :]
        return taken

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_steps())
            while True:
                await self._news.wait()
                self._news.clear()
                while wanted := self._choose():
                    await self._take(wanted)

    async def _watch_steps(self) -> None:
        while True:
            await self._turns.steps.ended.wait()
            for ask in self._asks:
                ask.dry = False
            self._news.set()

    def _choose(self) -> list[tuple[Outgoing, int, bytes]]:
        """The blocks of the next call: no more than the engine takes at once, and than there are
        rows. Who comes first changes.
        """
        left, wanted = min(self._turns.most, len(self._free)), list[tuple[Outgoing, int, bytes]]()
        for ask in self._asks:
            room = 0 if ask.dry else min(left, ask.tries, self._most_rows - len(ask.rows))
            for number, digest in (
                ask.pending.popleft() for _ in range(min(room, len(ask.pending)))
            ):
                wanted.append((ask, number, digest))
                left -= 1
        self._asks.rotate(-1)
        return wanted

    async def _take(self, wanted: Sequence[tuple[Outgoing, int, bytes]]) -> None:
        rows = [self._free.pop() for _ in wanted]
        stepped, waited = self._turns.steps.ended, {ask for ask, _, _ in wanted if ask.waits}
        try:
            there = await self._turns.take_out([digest for _, _, digest in wanted], rows)
        except BaseException:
            self._free += rows
            raise
        missed = defaultdict[Outgoing, list[tuple[int, bytes]]](list)
        for (ask, number, digest), row, got in zip(wanted, rows, there, strict=True):
            if got and not ask.gone:
                ask.rows.add(row)
                ask.tries = 1 << 30
                ask.ready.put_nowait(Ready(number, row))
                continue
            self._free.append(row)
            if not got and ask in waited:
                missed[ask].append((number, digest))
        for ask, blocks in missed.items():
            ask.pending.extendleft(reversed(blocks))
            if ask.waits:
                ask.dry, ask.tries = not stepped.is_set(), 1
        for ask in {ask for ask, _, _ in wanted}:
            if not ask.pending:
                ask.ready.put_nowait(None)
