"""The facts of an engine in its worker's heartbeat."""

import asyncio
from random import Random

import msgspec
from msgspec.structs import asdict, replace

from services.worker import service as worker
from services.worker.config import WorkerConfig
from services.worker.engines.make import sim_facts
from services.worker.engines.sim.engine import SimEngine
from services.worker.step_runner import StepRunner
from shared import subjects
from shared.bus.api import Call
from shared.perf import profile_file as profiles
from shared.schemas import Announce
from shared.telemetry.telemetry import Tracing
from shared.text.tokenizer import Tokenizer
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.runner import VirtualRunner
from tests.simulated.virtual_loop import run_virtual


async def announced(longest_chain: int) -> Announce:
    """The first heartbeat of a worker whose engine verifies such chains."""
    net, tokenizer, cfg = SimNet(Random(1), Faults()), Tokenizer.builtin(), WorkerConfig()
    facts = sim_facts(cfg, tokenizer)._replace(longest_chain=longest_chain)
    engine = SimEngine(facts, profiles.load(facts.profile), wait=None, clock=net.loop.time)
    heard: asyncio.Future[Announce] = asyncio.get_running_loop().create_future()

    def on_announce(announce: Announce, _: Call) -> None:
        if not heard.done():
            heard.set_result(announce)

    await net.connect("planner").subscribe(subjects.ANNOUNCEMENTS, Announce, on_announce)
    serving = asyncio.create_task(
        worker.serve(
            cfg,
            net.connect("worker"),
            net.clock,
            VirtualRunner(StepRunner(engine, tokenizer)),
            asyncio.Event(),
            tracing=Tracing(),
        )
    )
    found = await heard
    serving.cancel()
    return found


def test_a_worker_announces_the_longest_chain_that_its_engine_verifies() -> None:
    assert run_virtual(announced(5)).longest_chain == 5


def test_a_heartbeat_without_the_longest_chain_is_of_an_engine_that_verifies_trees() -> None:
    """As workers of before send it."""
    told = replace(run_virtual(announced(5)), longest_chain=0)
    before = {name: value for name, value in asdict(told).items() if name != "longest_chain"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=Announce) == told
