"""The load client learns from heartbeats what the fleet's engines are."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from loadgen.load.heartbeats import Heartbeats, resolved_by
from loadgen.load.tally import Tally
from services.admission.intake import resolve
from shared import subjects
from shared.bus.api import Bus
from shared.errors import ConfigError
from shared.schemas import Announce
from shared.testing.simulated_bus import SimNet
from shared.testing.virtual_loop import run_virtual
from shared.tiers import load_tiers
from shared.vocabulary import ReplicaId
from tests.loadgen.load.test_send import one

MULTIPLES = load_tiers("sola-10x")


def heartbeat(replica: str, context_tokens: int, profile: str = "a100-llama3-8b") -> Announce:
    return Announce(
        replica=ReplicaId(replica), incarnation="1", at_unix_s=0.0, model="m", engine="sim",
        profile=profile, pool="", kv_blocks=100, block_tokens=16, context_tokens=context_tokens,
        max_slots=8, epoch=0,
    )  # fmt: skip


def heard(body: Callable[[Heartbeats, Bus], Awaitable[None]]) -> None:
    """Run `body` with engines that listen, and the bus of a fleet."""

    async def run() -> None:
        net, heartbeats = SimNet(random.Random(0)), Heartbeats()
        await heartbeats.listen(net.connect("load"))
        await body(heartbeats, net.connect("fleet"))

    run_virtual(run())


def test_bounds_in_multiples_are_the_seconds_that_admission_holds_the_request_to() -> None:
    slow, quick = heartbeat("r1", 4096, "a100-llama3-70b-tp4"), heartbeat("r2", 8192)

    async def body(heartbeats: Heartbeats, fleet: Bus) -> None:
        for worker in (slow, quick):
            await fleet.publish(subjects.announce(worker.replica), worker)
        await asyncio.sleep(0.1)
        tally = Tally(MULTIPLES, resolved_by(await heartbeats.profile(), lambda _: 1024))
        outcome = tally.begin(one(0, "chat", prompt=700), 1000.0, 0.0)
        admissions = resolve(MULTIPLES.tiers["chat"].slo, 700, 1024, quick)
        assert outcome.slo == admissions
        assert outcome.slo.ttft_s is not None
        outcome.emit(1, 1000.0 + outcome.slo.ttft_s)
        outcome.end("stop")
        assert outcome.met

    heard(body)


def test_without_a_worker_bounds_in_multiples_are_refused() -> None:
    async def body(heartbeats: Heartbeats, fleet: Bus) -> None:
        with pytest.raises(ConfigError, match="need a running worker"):
            await heartbeats.profile()

    heard(body)
