"""Tests of KV that moves between real processes: engines of their own, a worker that is killed, and
one without memory for KV on its way.
"""

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from services.worker.config import WorkerConfig
from services.worker.engine_process import EngineProcess, engine_process
from services.worker.engines.torch.engine import TorchEngine
from services.worker.kv.mover import KvMover
from shared.core.worker.step import Load, Step, Work
from shared.schemas import Sampling
from shared.vocabulary import Slot
from tests.services.worker.kv.far import far
from tests.services.worker.kv.sides import BLOCK_TOKENS, WITHIN_S, Side, side, torch_engine, until
from tests.services.worker.tiny_models import tiny_model

PROMPT = [(11 * n + n // 7) % 256 for n in range(202)]
FULL = 200

# gives the KV of a prompt until it is killed
GIVER = """
import asyncio, sys
from pathlib import Path
from tests.services.worker.kv.sides import side, torch_engine
from tests.services.worker.kv.test_processes import PROMPT

async def main():
    async with side("giver", torch_engine(Path(sys.argv[1]))) as giver:
        await giver.prompt(0, PROMPT)
        print(giver.mover.address, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""
SMALL_FILES = 1 << 20  # bytes, less than a shelf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "Llama")


@pytest.fixture(scope="module")
def engine(model: Path) -> TorchEngine:
    return torch_engine(model)


@contextmanager
def giver(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", GIVER, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            yield process, next(line.strip() for line in lines if line.startswith("127."))
        finally:
            process.kill()


async def _has(one: Side, tokens: int) -> bool:
    return await one.has(PROMPT) >= tokens


async def test_a_giver_that_is_killed_in_the_middle_costs_no_more_than_what_did_not_come(
    model: Path, engine: TorchEngine
) -> None:
    """The first fetch has come half way; the second waits for a text that is not computed."""
    engine.restart()
    with giver(model) as (process, address):
        async with side("b", engine) as b, far(address) as proxy:
            proxy.stop = 30 * 4 * BLOCK_TOKENS * 2 * 2 * 32
            fetching = asyncio.create_task(
                b.mover.fetch("k", PROMPT, b"", proxy.address, 10 * WITHIN_S)
            )
            await proxy.stopped.wait()
            await until(lambda: _has(b, 29 * BLOCK_TOKENS))
            b.mover.ahead("l", [5, *PROMPT], b"", address)
            process.send_signal(signal.SIGKILL)
            process.wait()
            async with asyncio.timeout(WITHIN_S):
                assert await fetching == 29 * BLOCK_TOKENS
                assert await b.mover.fetch("l", [5, *PROMPT], b"", address, 10 * WITHIN_S) == 0
            done = await b.prompt(0, PROMPT)
            assert done.cached == 29 * BLOCK_TOKENS and done.computed == len(PROMPT)
    # the memory of a worker that was killed is gone with it
    assert not [path for path in Path("/dev/shm").iterdir() if "slackline" in path.name]


async def test_a_worker_without_memory_for_kv_on_its_way_serves_and_moves_none(
    engine: TorchEngine,
) -> None:
    engine.restart()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILES, before[1]))
    try:
        async with side("b", engine) as b:
            assert (b.mover.address, b.mover.move_s) == ("", 0.0)
            assert await b.mover.fetch("k", PROMPT, b"", "127.0.0.1:1", WITHIN_S) == 0
            assert (await b.prompt(0, PROMPT)).computed == len(PROMPT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def prompt(engine: EngineProcess, tokens: Sequence[int], slot: int) -> tuple[int, list[int]]:
    """The positions that the engine found, and its answer of some tokens."""
    asked = Sampling(temperature=0.0, ignore_eos=True)
    load = Load(Slot(slot), tokens, 0, asked, 1)
    ran = await engine.run(
        Step(None, [], [], [load], [Work(Slot(slot), len(tokens), True)], None, [])
    )
    said = list(ran.done[0].tokens)
    for _ in range(5):
        step = Step(None, [], [], [], [Work(Slot(slot), 1, True)], None, [])
        said += (await engine.run(step)).done[0].tokens
    return ran.done[0].cached, said


@pytest.mark.slow
async def test_kv_moves_between_engines_in_processes_of_their_own_while_they_compute(
    model: Path,
) -> None:
    cfg = WorkerConfig(
        engine="torch",
        model=str(model),
        draft_model="none",
        profile_s=0.0,
        kv_blocks=200,
        block_tokens=BLOCK_TOKENS,
        max_slots=8,
        kv_listen="127.0.0.1:0",
    )
    stop = asyncio.Event()
    async with engine_process(cfg, stop) as one, engine_process(cfg, stop) as other:
        assert one is not None and other is not None
        movers = KvMover(one, cfg), KvMover(other, cfg)
        try:
            for mover in movers:
                await mover.start()
            cached, said = await prompt(one, PROMPT, 0)
            assert cached == 0
            busy = asyncio.create_task(prompt(other, [9] * 50, 1))
            there = await movers[1].fetch("k", PROMPT, b"", movers[0].address, WITHIN_S)
            await busy
            assert there == FULL
            assert await prompt(other, PROMPT, 0) == (FULL, said)
        finally:
            for mover in movers:
                await mover.close()
    for mover in movers:
        mover.check()
