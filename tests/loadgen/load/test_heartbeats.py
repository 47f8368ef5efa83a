"""Tests of how `slackline load` reads workers' heartbeats: the profile that turns multiples of
zero-load times into seconds, the context of all workers, how engines spent their time.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from loadgen.load.heartbeats import Heartbeats, resolved_by
from loadgen.load.report import engine_time
from loadgen.load.tally import Tally
from services.admission.intake.reading import resolve
from shared import subjects
from shared.bus.api import Bus
from shared.core.worker.step import Ran, Step
from shared.errors import ConfigError
from shared.rules.tiers import load_tiers
from shared.schemas import Announce, EngineTime, PlanAck
from shared.store.acklog import decode_entry
from shared.vocabulary import ReplicaId
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.loadgen.load.test_send import one
from tests.simulated.bus import SimNet
from tests.simulated.runner import VirtualRunner
from tests.simulated.virtual_loop import run_virtual

MULTIPLES = load_tiers("sola-10x")


def heartbeat(replica: str, context_tokens: int, profile: str = "a100-llama3-8b") -> Announce:
    return Announce(
        replica=ReplicaId(replica), incarnation="1", at_unix_s=0.0, model="m", engine="sim",
        profile=profile, pool="", kv_blocks=100, block_tokens=16, context_tokens=context_tokens,
        max_slots=8, epoch=0,
    )  # fmt: skip


def heard(body: Callable[[Heartbeats, Bus], Awaitable[None]]) -> None:
    """Run `body` with Heartbeats that listen, and the bus of a fleet."""

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


def test_without_a_worker_there_is_no_profile() -> None:
    async def body(heartbeats: Heartbeats, fleet: Bus) -> None:
        with pytest.raises(ConfigError, match="no worker is heard"):
            await heartbeats.profile()

    heard(body)


def spent(first_s: float, *heartbeats: tuple[str, EngineTime]) -> EngineTime:
    """The time that is reported after heartbeats of these incarnations; the run begins with the
    first, when the engine has computed for `first_s` already.
    """
    found: list[EngineTime] = []

    async def body(listener: Heartbeats, fleet: Bus) -> None:
        worker = structs.replace(heartbeat("r1", 4096), time=EngineTime(exec_s=first_s))
        await fleet.publish(subjects.announce(worker.replica), worker)
        for incarnation, time in heartbeats:
            worker = structs.replace(worker, incarnation=incarnation, time=time)
            await fleet.publish(subjects.announce(worker.replica), worker)
            await asyncio.sleep(0.1)
        found.append(await listener.spent())

    heard(body)
    return found[0]


def test_the_time_of_a_run_is_what_came_since_its_first_heartbeat_over_a_restart_too() -> None:
    later = EngineTime(exec_s=12.0, idle_s=0.5, late_s=0.25, predicted_s=11.0)
    assert spent(10.0, ("1", later)) == structs.replace(later, exec_s=2.0)
    again = [EngineTime(), EngineTime(exec_s=3.0)]
    assert spent(10.0, ("1", later), *[("2", time) for time in again]).exec_s == 2.0 + 3.0


@pytest.mark.parametrize("slow_s", [0.0, 0.01])
def test_a_worker_tells_what_its_engine_computed_waited_and_lost(
    slow_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_turn = VirtualRunner.run

    async def slowly(runner: VirtualRunner, turn: Step) -> Ran:
        ran = await run_turn(runner, turn)
        await asyncio.sleep(slow_s if turn.work else 0.0)
        return ran

    monkeypatch.setattr(VirtualRunner, "run", slowly)

    async def main() -> None:
        calm = Scene(faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, replicas=1)
        world, heartbeats = World(calm, 3), Heartbeats()
        await heartbeats.listen(world.net.connect("load"))
        await world.play()
        time = await heartbeats.spent()
        entries = [decode_entry(payload) for _, payload in world.written]
        acks = [entry for entry in entries if isinstance(entry, PlanAck) and entry.slots]
        assert len(acks) > 50
        assert time.exec_s == pytest.approx(sum(ack.exec_s for ack in acks))
        assert time.idle_s == pytest.approx(sum(ack.idle_s for ack in acks))
        assert time.late_s == pytest.approx(slow_s * len(acks), abs=0.001)
        assert time.predicted_s == pytest.approx(time.exec_s + time.late_s, rel=0.1)

    run_virtual(main())


def test_a_report_says_how_the_engines_spent_the_time_in_which_they_held_work() -> None:
    spent = EngineTime(exec_s=8.0, idle_s=1.5, late_s=0.5, predicted_s=10.0)
    assert "for 10.0 s: they computed 80.0 % of it, waited 15.0 % for plans" in engine_time(spent)
    assert "computed nothing" in engine_time(EngineTime())


def test_the_context_of_a_load_is_what_every_worker_has_and_silence_is_seen() -> None:
    async def body(heartbeats: Heartbeats, fleet: Bus) -> None:
        with pytest.raises(ConfigError, match="--context"):
            await heartbeats.context_tokens()
        for worker in (heartbeat("r1", 4096), heartbeat("r2", 8192)):
            await fleet.publish(subjects.announce(worker.replica), worker)
        assert await heartbeats.context_tokens() == 4096
        await asyncio.sleep(20.0)
        assert heartbeats.silent_s > 19.0
        await fleet.publish(subjects.announce(ReplicaId("r1")), heartbeat("r1", 4096))
        await asyncio.sleep(0.1)
        assert heartbeats.silent_s < 1.0

    heard(body)
