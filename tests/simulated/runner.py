"""Runs the steps of a simulated worker in virtual time."""

import asyncio

from services.worker.engine import EngineFacts
from services.worker.engines.kv_calls import KvAnswer, KvCall
from services.worker.runner import Steps
from services.worker.step_runner import StepRunner
from shared.core.worker.step import Ran, Step
from shared.perf.profile_file import ProfileFile
from shared.structured import Structured


class VirtualRunner:
    """Implements services.worker.runner.Runner. The engine answers at once and says how long a
    step takes; then so much virtual time passes.
    """

    fitted: ProfileFile | None = None

    def __init__(self, steps: StepRunner) -> None:
        self._steps, self.steps = steps, Steps()

    @property
    def facts(self) -> EngineFacts:
        return self._steps.engine.facts

    async def run(self, step: Step) -> Ran:
        ran = self._steps.run(step)
        await asyncio.sleep(ran.exec_s)
        return self.steps.over(ran)

    async def kv(self, call: KvCall) -> KvAnswer:
        return self._steps.kv.run(call)

    async def reset(self) -> None:
        self._steps.reset()

    async def refusal(self, wanted: Structured) -> str:
        return ""
