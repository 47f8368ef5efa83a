"""A worker's runner in virtual time."""

import asyncio

from services.worker.engine import EngineFacts
from services.worker.step_runner import StepRunner
from shared.core.worker.step import Ran, Step
from shared.perf.profile_file import ProfileFile
from shared.structured import Structured


class VirtualRunner:
    """The runner of an event loop in virtual time: the engine answers at once with the seconds that
    the step takes, and that time passes.
    """

    fitted: ProfileFile | None = None

    def __init__(self, steps: StepRunner) -> None:
        self._steps = steps

    @property
    def facts(self) -> EngineFacts:
        return self._steps.engine.facts

    async def run(self, step: Step) -> Ran:
        ran = self._steps.run(step)
        await asyncio.sleep(ran.exec_s)
        return ran

    async def reset(self) -> None:
        self._steps.reset()

    async def refusal(self, wanted: Structured) -> str:
        return ""
