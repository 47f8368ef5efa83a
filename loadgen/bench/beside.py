"""A stand-in for all of a fleet but the service that is measured."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self

from loadgen.bench.figure import Figure
from shared import subjects
from shared.bus.api import Bus
from shared.clock import Clock
from shared.process.chores import Chores
from shared.schemas import Digest
from shared.vocabulary import ReplicaId

EVERY = ReplicaId(subjects.EVERY)


class Beside(ABC):
    """A stand-in. Use it as an async context; its tasks end with it."""

    note = ""  # on the load

    def __init__(self, bus: Bus, clock: Clock, rng: Random, ports: Sequence[int]) -> None:
        """`ports`: of the processes that are measured, if they listen."""
        self._bus, self._clock, self._rng, self._ports = bus, clock, rng, ports
        self._chores = Chores()
        self._tasks: list[asyncio.Task[None]] = []

    @abstractmethod
    async def load(self, quick: bool) -> None:
        """Begin to load the service; return once it works. `quick`: with little."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was measured before."""

    @property
    @abstractmethod
    def done(self) -> int:
        """The units, such as requests, that the service has served since `reset`."""

    def figures(self, part: str, prefix: str) -> list[Figure]:
        """Figures of its own, since `reset`."""
        return []

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._chores.start(work, "bench"))

    async def __aenter__(self) -> Self:
        await self._chores.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._chores.__aexit__(kind, error, trace)


def digest(replica: ReplicaId, incarnation: str, kv_blocks: int, now_unix_s: float) -> Digest:
    """A replica without work."""
    return Digest(
        replica=replica,
        incarnation=incarnation,
        planner="p1",
        at_unix_s=now_unix_s,
        model="m",
        pool="",
        waiting=0,
        running=0,
        best_effort=0,
        waiting_prefill_tokens=0,
        backlog_s=0.0,
        kv_blocks=kv_blocks,
        kv_free_blocks=kv_blocks,
        free_slots=4096,
        surplus=True,
    )
