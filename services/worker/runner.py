"""Runners take turns: on one engine thread beside the event loop, or, in virtual time, at once,
with a sleep as long as the turn took.

Real engines have a process of their own instead (`engine_process.py`).
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from services.worker.engine import EngineFacts
from services.worker.step_runner import TurnTaker
from shared.core.worker.step import Ran, Turn
from shared.perf.profile_file import ProfileFile
from shared.structured import Structured


class Runner(Protocol):
    """An engine and its speaker, in a thread or in another process. Calls never overlap."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def fitted(self) -> ProfileFile | None:
        """The profile that was measured on the engine, if there is one."""

    async def run(self, turn: Turn) -> Ran:
        """Take the turn."""

    async def reset(self) -> None:
        """Forget every slot, after the turn that still runs."""

    async def refusal(self, wanted: Structured) -> str:
        """Why the engine never takes this format of an output; empty if it does. Raises
        TimeoutError where that cannot be told now.
        """


class ThreadRunner:
    """The runner of a simulated engine, which hardly uses the interpreter. The event loop stays
    free while it works.
    """

    fitted: ProfileFile | None = None

    def __init__(self, taker: TurnTaker) -> None:
        self._taker = taker
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @property
    def facts(self) -> EngineFacts:
        return self._taker.engine.facts

    async def run(self, turn: Turn) -> Ran:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._taker.take, turn)

    async def reset(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self._taker.reset)

    async def refusal(self, wanted: Structured) -> str:
        return ""

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class VirtualRunner:
    """The runner of an event loop in virtual time: the engine answers at once with the seconds that
    the turn takes, and that time passes.
    """

    fitted: ProfileFile | None = None

    def __init__(self, taker: TurnTaker) -> None:
        self._taker = taker

    @property
    def facts(self) -> EngineFacts:
        return self._taker.engine.facts

    async def run(self, turn: Turn) -> Ran:
        ran = self._taker.take(turn)
        await asyncio.sleep(ran.exec_s)
        return ran

    async def reset(self) -> None:
        self._taker.reset()

    async def refusal(self, wanted: Structured) -> str:
        return ""
