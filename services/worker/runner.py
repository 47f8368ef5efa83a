"""Runs an engine's iterations: on a thread of this process, or in a child (engine_process.py)."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from services.worker.engine import EngineFacts
from services.worker.step_runner import StepRunner
from shared.core.worker.step import Ran, Step
from shared.perf.profile_file import ProfileFile
from shared.structured import Structured


class Runner(Protocol):
    """An engine and its processor, in a thread or in another process. Calls never overlap."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def fitted(self) -> ProfileFile | None:
        """The profile that was measured on the engine, if there is one."""

    async def run(self, step: Step) -> Ran:
        """Run the step."""

    async def reset(self) -> None:
        """Forget every slot, after the step that still runs."""

    async def refusal(self, wanted: Structured) -> str:
        """Why the engine never takes this format, or empty. Raises TimeoutError if unknown."""


class ThreadRunner:
    """The runner of a simulated engine: a thread, which leaves the event loop free."""

    fitted: ProfileFile | None = None

    def __init__(self, steps: StepRunner) -> None:
        self._steps = steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @property
    def facts(self) -> EngineFacts:
        return self._steps.engine.facts

    async def run(self, step: Step) -> Ran:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._steps.run, step)

    async def reset(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self._steps.reset)

    async def refusal(self, wanted: Structured) -> str:
        return ""

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
