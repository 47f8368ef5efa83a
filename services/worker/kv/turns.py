"""The rows of the shelf for what comes, and the turns of the engine."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from services.worker.engine import KvName, Lacking
from services.worker.engines.kv_calls import BringIn, KvAnswer, KvCall, Look, TakeOut
from services.worker.engines.shelf import Shelf
from services.worker.kv.wire import MOST_OF_A_MESSAGE
from services.worker.runner import Runner

CALL_S = 0.002  # the time of the engine that a call may take
_NEW = 0.2  # the weight of the newest call in what a block takes

T = TypeVar("T")


class Rows:
    """The rows of the shelf for what comes. A row is given to one at a time."""

    def __init__(self, rows: Iterable[int]) -> None:
        self._free = list(rows)
        self._count = asyncio.Semaphore(len(self._free))

    @property
    def free(self) -> int:
        """Their number."""
        return len(self._free)

    async def some(self, most: int) -> list[int]:
        """So many rows at most, once there is one."""
        await self._count.acquire()
        rows = [self._free.pop()]
        while len(rows) < most and not self._count.locked():
            await self._count.acquire()  # at once
            rows.append(self._free.pop())
        return rows

    def give(self, rows: Iterable[int]) -> None:
        """They are free again."""
        for row in rows:
            self._free.append(row)
            self._count.release()


class EngineTurns:
    """Calls for the KV of the engine, one at a time, so that a step waits for one at most. A call
    takes so many blocks as CALL_S allows.
    """

    def __init__(self, runner: Runner, shelf: Shelf) -> None:
        self._runner, self._shelf = runner, shelf
        self._lock = asyncio.Lock()
        self._block_s = CALL_S  # that a block takes
        self.spent_s = 0.0  # of the engine's time

    @property
    def stepped(self) -> asyncio.Event:
        return self._runner.stepped

    @property
    def most(self) -> int:
        """The blocks of a call."""
        return max(1, min(MOST_OF_A_MESSAGE, int(CALL_S / self._block_s)))

    async def look(self, tokens: Sequence[int], salt: bytes) -> Lacking:
        return (await self._call(Look(tokens, salt))).lacking

    async def take_out(self, digests: Sequence[bytes], rows: Sequence[int]) -> Sequence[bool]:
        return await self._moved(TakeOut(self._shelf.at, digests, rows))

    async def bring_in(self, names: Sequence[KvName], rows: Sequence[int]) -> Sequence[bool]:
        return await self._moved(BringIn(self._shelf.at, names, rows))

    async def _moved(self, call: TakeOut | BringIn) -> Sequence[bool]:
        answer = await self._call(call)
        if moved := sum(answer.there):
            self._block_s += _NEW * (max(answer.took_s / moved, 1e-6) - self._block_s)
        return answer.there

    async def _call(self, call: KvCall) -> KvAnswer:
        async with self._lock:
            answer = await to_its_end(self._runner.kv(call))
        self.spent_s += answer.took_s
        return answer


async def to_its_end(work: Awaitable[T]) -> T:
    """Awaits this to its end, even if cancelled: it uses rows that others get afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        task.exception()  # nobody else asks for it
        raise
