"""A worker and its log: a store that does not answer stops neither its heartbeats nor its end."""

import asyncio
import itertools
import logging
from collections.abc import Iterator
from random import Random

import pytest
import structlog

from services.worker import service as worker
from services.worker.config import WorkerConfig
from services.worker.engines.make import sim_facts
from services.worker.engines.sim_engine import SimEngine
from services.worker.runner import VirtualRunner
from services.worker.turn_taker import TurnTaker
from shared import subjects
from shared.bus.api import Call
from shared.perf import profile_file as profiles
from shared.process.telemetry import Off
from shared.schemas import Announce
from shared.testing.simulated_broker import Faults
from shared.testing.simulated_bus import SimNet
from shared.testing.virtual_loop import run_virtual
from shared.text.tokenizer import Tokenizer

NO_STORE = Faults(store_lost=1.0)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


class Serving:
    """A worker on a simulated bus, and the instants of its heartbeats."""

    def __init__(self) -> None:
        self.net, self.stop = SimNet(Random(1), Faults()), asyncio.Event()
        self.heard_s: list[float] = []

    async def begin(self) -> None:
        def on_announce(_: Announce, __: Call) -> None:
            self.heard_s.append(self.net.loop.time())

        net, tokenizer, cfg = self.net, Tokenizer.builtin(), WorkerConfig()
        facts = sim_facts(cfg, tokenizer)
        engine = SimEngine(facts, profiles.load(facts.profile), wait=None, clock=net.loop.time)
        await net.connect("admission").subscribe(subjects.ANNOUNCEMENTS, Announce, on_announce)
        self.task = asyncio.create_task(
            worker.serve(
                cfg,
                net.connect("worker"),
                net.clock,
                VirtualRunner(TurnTaker(engine, tokenizer)),
                self.stop,
                tracing=Off(),
                rng=Random(2),
            )
        )

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(30.0):
            await self.task


def test_a_worker_whose_log_does_not_answer_yet_waits_for_it() -> None:
    """It does not end: its engine may have taken minutes to load."""

    async def main() -> list[float]:
        serving = Serving()
        serving.net.faults = NO_STORE
        await serving.begin()
        await asyncio.sleep(10.0)
        serving.net.faults = Faults()
        await asyncio.sleep(10.0)
        await serving.end()
        return serving.heard_s

    heard_s = run_virtual(main())
    assert heard_s[0] > 10.0


def test_a_worker_whose_log_takes_no_writes_yet_obeys_all_the_same() -> None:
    async def main() -> list[float]:
        serving = Serving()
        serving.net.fill(1000.0)
        await serving.begin()
        await asyncio.sleep(10.0)
        await serving.end()
        return serving.heard_s

    assert not run_virtual(main())


def test_a_worker_whose_log_does_not_answer_goes_on_announcing_itself() -> None:
    async def main() -> list[float]:
        serving = Serving()
        await serving.begin()
        await asyncio.sleep(5.0)
        serving.net.faults = NO_STORE
        await asyncio.sleep(20.0)
        serving.net.faults = Faults()
        await serving.end()
        return serving.heard_s

    heard_s = run_virtual(main())
    assert heard_s[-1] > 24.0
    gaps_s = [after - before for before, after in itertools.pairwise(heard_s)]
    assert max(gaps_s) < 2.0  # admission takes a worker to be lost after three
