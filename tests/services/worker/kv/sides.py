"""Workers' ends of moving KV, for tests: a tiny engine beside the event loop, and its mover."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.worker.config import WorkerConfig
from services.worker.engine import Engine
from services.worker.engines.torch.engine import TorchEngine
from services.worker.kv.mover import KvMover
from services.worker.runner import ThreadRunner
from services.worker.step_runner import StepRunner
from shared.core.worker.step import Load, Step, TurnDone, Work
from shared.schemas import Sampling
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot

BLOCK_TOKENS = 4
WITHIN_S = 60.0  # the longest that a busy machine may take for anything


class Side:
    """A worker's engine, runner and mover."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.engine, self.runner = engine, ThreadRunner(StepRunner(engine, Tokenizer.builtin()))
        self.mover = KvMover(self.runner, WorkerConfig(replica=name, kv_listen="127.0.0.1:0"))
        self._computed = dict[int, int]()

    async def load(self, slot: int, tokens: Sequence[int]) -> None:
        load = Load(Slot(slot), tokens, 0, Sampling(temperature=0.0, ignore_eos=True), 1)
        await self.runner.run(Step(None, [], [], [load], [], None, []))

    async def work(self, slot: int, tokens: int, emits: bool) -> TurnDone:
        ran = await self.runner.run(
            Step(None, [], [], [], [Work(Slot(slot), tokens, emits)], None, [])
        )
        return ran.done[0]

    async def prompt(self, slot: int, tokens: Sequence[int]) -> TurnDone:
        """Loads the request and computes its whole prompt."""
        await self.load(slot, tokens)
        return await self.work(slot, len(tokens), True)

    async def go_on(self, slot: int, tokens: int) -> list[int]:
        """Generate so many more tokens."""
        return [(await self.work(slot, 1, True)).tokens[0] for _ in range(tokens)]

    async def has(self, tokens: Sequence[int]) -> int:
        """The positions of this text that its engine has."""
        loop = asyncio.get_running_loop()
        lacking = await loop.run_in_executor(None, self.engine.lacking, tokens, b"")
        return lacking.tokens


@asynccontextmanager
async def side(name: str, engine: Engine) -> AsyncIterator[Side]:
    made = Side(name, engine)
    try:
        await made.mover.start()
        yield made
    finally:
        await made.mover.close()
        made.runner.close()
        made.mover.check()


def torch_engine(model: Path, **more: Any) -> TorchEngine:
    usual: dict[str, Any] = {"kv_blocks": 200, "block_tokens": BLOCK_TOKENS, "max_slots": 8}
    return TorchEngine(model, profile="toy", device="cpu", **{**usual, **more})


async def until(done: Any) -> None:
    """Wait for this to be true; `done` may be asynchronous."""
    async with asyncio.timeout(WITHIN_S):
        while not await done():
            await asyncio.sleep(0.005)
