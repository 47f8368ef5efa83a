"""Runs an engine's iterations: on a thread of this process, or in a child (engine_process.py)."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from services.worker.engine import EngineFacts
from services.worker.engines.kv_calls import KvAnswer, KvCall
from services.worker.step_runner import StepRunner
from shared.core.worker.step import Ran, Step
from shared.perf.profile_file import ProfileFile
from shared.structured import Structured


class Runner(Protocol):
    """An engine and its processor, in a thread or in another process. Steps never overlap."""

    steps: "Steps"

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def fitted(self) -> ProfileFile | None:
        """The profile that was measured on the engine, if there is one."""

    async def run(self, step: Step) -> Ran:
        """Run the step."""

    async def reset(self) -> None:
        """Forget every slot, after the step that still runs."""

    async def kv(self, call: KvCall) -> KvAnswer:
        """Make the call once the step under way has ended, before the next. Raises EngineError."""

    async def refusal(self, wanted: Structured) -> str:
        """Why the engine never takes this format, or empty. Raises TimeoutError if unknown."""


class Steps:
    """Tells when a step has ended. `ended` is set by the next one, and then replaced; `exec_s`: how
    long the newest one took.
    """

    def __init__(self) -> None:
        self.ended, self.exec_s = asyncio.Event(), 0.0

    def over(self, ran: Ran) -> Ran:
        """Such a step has ended."""
        self.exec_s = ran.exec_s
        self.ended.set()
        self.ended = asyncio.Event()
        return ran


class ThreadRunner:
    """The runner of a simulated engine: a thread, which leaves the event loop free."""

    fitted: ProfileFile | None = None

    def __init__(self, steps: StepRunner) -> None:
        self._steps, self.steps = steps, Steps()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @property
    def facts(self) -> EngineFacts:
        return self._steps.engine.facts

    async def run(self, step: Step) -> Ran:
        loop = asyncio.get_running_loop()
        return self.steps.over(await loop.run_in_executor(self._pool, self._steps.run, step))

    async def reset(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self._steps.reset)

    async def kv(self, call: KvCall) -> KvAnswer:
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._steps.kv.run, call
        )

    async def refusal(self, wanted: Structured) -> str:
        return ""

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
