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

    stepped: asyncio.Event  # set as the next step ends, and then replaced

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


def after(stepped: asyncio.Event) -> asyncio.Event:
    """A step has ended: whoever waits for it goes on. Returns the event of the next."""
    stepped.set()
    return asyncio.Event()


class ThreadRunner:
    """The runner of a simulated engine: a thread, which leaves the event loop free."""

    fitted: ProfileFile | None = None

    def __init__(self, steps: StepRunner) -> None:
        self._steps, self.stepped = steps, asyncio.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @property
    def facts(self) -> EngineFacts:
        return self._steps.engine.facts

    async def run(self, step: Step) -> Ran:
        ran = await asyncio.get_running_loop().run_in_executor(self._pool, self._steps.run, step)
        self.stepped = after(self.stepped)
        return ran

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
