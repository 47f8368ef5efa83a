"""Tests of simulated KV that moves: no bytes, but the books, and the time of the link."""

import asyncio
import time

import pytest

from services.worker.config import WorkerConfig
from services.worker.engines.make import make
from services.worker.engines.sim.engine import SimEngine
from services.worker.kv.mover import KvMover
from services.worker.kv.server import MOST_CONNECTIONS
from services.worker.runner import ThreadRunner
from services.worker.step_runner import StepRunner
from shared.errors import ConfigError
from tests.services.worker.kv.sides import WITHIN_S, side, until

TEXT = [n % 250 for n in range(1000)]
FULL = 960  # 15 stretches of 64 tokens


def engine(**more: object) -> SimEngine:
    settings = {"prefix_caching": True, "pace": 0.001, "kv_link_gbit_s": 0.001, **more}
    made, _ = make(WorkerConfig(engine="sim", **settings))  # type: ignore[arg-type]
    assert isinstance(made, SimEngine)
    return made


async def test_simulated_kv_is_known_after_the_time_of_the_link() -> None:
    # 131,072 bytes a token at 1 Mbit/s, a thousand times as fast: 1.05 ms each
    async with side("a", engine()) as a, side("b", engine()) as b:
        assert b.mover.move_s == pytest.approx(131_072 * 8 / 1e9)
        await a.prompt(0, TEXT)
        began_s = time.monotonic()
        assert await b.mover.fetch("k", TEXT, b"", a.mover.address, WITHIN_S) == FULL
        assert time.monotonic() - began_s >= FULL * b.mover.move_s
        done = await b.prompt(0, TEXT)
        assert (done.cached, done.computed) == (FULL, len(TEXT))
        for one in (a, b):
            one.engine.restart()
            one.engine.check()  # type: ignore[attr-defined]


async def test_blocks_of_a_simulated_prompt_come_while_it_is_computed() -> None:
    async with side("a", engine()) as a, side("b", engine(kv_link_gbit_s=100.0)) as b:
        b.mover.ahead("k", TEXT, b"", a.mover.address)
        await a.load(0, TEXT)
        await a.work(0, 500, False)
        async with asyncio.timeout(WITHIN_S):
            while await b.has(TEXT) < 448:
                await asyncio.sleep(0.005)
        await a.work(0, 500, True)
        assert await b.mover.fetch("k", [*TEXT, 1], b"", a.mover.address, WITHIN_S) == FULL


async def test_whoever_holds_all_connections_keeps_others_out_only_as_long() -> None:
    async with side("a", engine()) as a, side("b", engine(kv_link_gbit_s=100.0)) as b:
        await a.prompt(0, TEXT)
        host, _, port = a.mover.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(MOST_CONNECTIONS)]
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(WITHIN_S):
            assert await reader.read() == b"", "one too many"
        for _, each in (*silent, (reader, writer)):
            each.close()

        async def comes() -> bool:
            return await b.mover.fetch("k", TEXT, b"", a.mover.address, WITHIN_S) == FULL

        await until(comes)


async def test_engines_of_other_models_have_nothing_for_each_other() -> None:
    async with side("a", engine()) as a, side("b", engine(profile="a100-qwen-14b")) as b:
        await a.prompt(0, TEXT)
        assert await b.mover.fetch("k", TEXT, b"", a.mover.address, WITHIN_S) == 0


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"prefix_caching": False}, "prefix_caching"),
        ({"kv_listen": "here"}, "host:port"),
        ({"kv_listen": "nowhere.invalid:1"}, "kv_listen"),
    ],
)
async def test_a_worker_whose_kv_cannot_move_says_why(more: dict[str, object], fault: str) -> None:
    settings = {"prefix_caching": True, "kv_listen": "127.0.0.1:0", **more}
    cfg = WorkerConfig(engine="sim", **settings)  # type: ignore[arg-type]
    runner = ThreadRunner(StepRunner(*make(cfg)))
    mover = KvMover(runner, cfg)
    with pytest.raises(ConfigError, match=fault):
        await mover.start()
    await mover.close()
    runner.close()
