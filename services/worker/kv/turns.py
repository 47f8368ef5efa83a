"""The rows of the shelf for what comes, and the turns of the engine."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from services.worker.engine import KvName, Lacking
from services.worker.engines.kv_calls import BringIn, KvAnswer, KvCall, Look, TakeOut
from services.worker.engines.shelf import Shelf
from services.worker.kv.wire import MOST_OF_A_MESSAGE
from services.worker.runner import Runner, Steps

# the time between two steps that calls may take: a part of a step's, and no less than this
SHARE, SHORTEST_S = 0.1, 0.002
NEW = 0.2  # the weight of the newest call in what calls take
FASTEST_S = 1e-6  # for a block

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
    """Calls for the KV of the engine. They are made between two steps; those that are under way at
    one time take SHARE of a step's time, or SHORTEST_S, and the rest waits its turn.
    """

    def __init__(self, runner: Runner, shelf: Shelf) -> None:
        self._runner, self._shelf = runner, shelf
        self._block_s = self._look_s = SHORTEST_S  # that a block, and a look, takes
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._under_way, self._under_way_s = 0, 0.0
        self.spent_s = 0.0  # of the engine's time

    @property
    def steps(self) -> Steps:
        return self._runner.steps

    @property
    def most(self) -> int:
        """The blocks of a call."""
        return max(1, min(MOST_OF_A_MESSAGE, int(self._most_s / self._block_s)))

    @property
    def _most_s(self) -> float:
        return max(SHORTEST_S, SHARE * self._runner.steps.exec_s)

    async def look(self, tokens: Sequence[int], salt: bytes) -> Lacking:
        answer = await self._call(Look(tokens, salt), self._look_s)
        self._look_s += NEW * (answer.took_s - self._look_s)
        return answer.lacking

    async def take_out(self, digests: Sequence[bytes], rows: Sequence[int]) -> Sequence[bool]:
        return await self._move(TakeOut(self._shelf.at, digests, rows))

    async def bring_in(self, names: Sequence[KvName], rows: Sequence[int]) -> Sequence[bool]:
        return await self._move(BringIn(self._shelf.at, names, rows))

    async def _move(self, call: TakeOut | BringIn) -> Sequence[bool]:
        answer = await self._call(call, len(call.rows) * self._block_s)
        if moved := sum(answer.there):
            self._block_s += NEW * (max(answer.took_s / moved, FASTEST_S) - self._block_s)
        return answer.there

    async def _call(self, call: KvCall, expected_s: float) -> KvAnswer:
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((expected_s, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # it was granted just now
                self._leave(expected_s)
            raise
        try:
            answer = await to_its_end(self._runner.kv(call))
        finally:
            self._leave(expected_s)
        self.spent_s += answer.took_s
        return answer

    def _grant(self) -> None:
        while self._waiting:
            expected_s, granted = self._waiting[0]
            if granted.cancelled():
                self._waiting.popleft()
                continue
            if self._under_way and self._under_way_s + expected_s > self._most_s:
                return
            self._waiting.popleft()
            self._under_way += 1
            self._under_way_s += expected_s
            granted.set_result(None)

    def _leave(self, expected_s: float) -> None:
        self._under_way -= 1
        self._under_way_s = self._under_way_s - expected_s if self._under_way else 0.0
        self._grant()


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
