"""Tests of the tasks in the store: admissions count the rounds of a session alike, whatever races
and whatever answers the store loses.
"""

import asyncio
import random

import pytest

from services.admission.intake.task_store import TaskStore
from shared.bus.api import Bus
from shared.core.record.verdict import ended
from shared.errors import BusError, StoreDamaged
from shared.schemas import Body, Record, Resume, Sampling, TaskSoFar
from shared.store.records import Records
from shared.vocabulary import FinishReason, Slo
from tests import made
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import run_virtual

SEEDS = range(30)
BAD = Faults(store_lost=0.15, store_silent=0.2, store_late=0.2)
ROUNDS, BESIDE = 4, 3


def asked(name: str, at_s: float, session: str = "any text: 1 é") -> Record:
    return made.record(
        f"t.{name}", slo=Slo(task_ttlt_s=600.0), session=session, arrived_unix_s=at_s
    )


class Admission:
    def __init__(self, bus: Bus) -> None:
        self.records = Records(bus.requests, bus.bodies)
        self.tasks = TaskStore(bus.requests, self.records)

    async def takes_in(self, record: Record) -> TaskSoFar:
        while True:
            try:
                task = (await self.tasks.join(record)).task
                await self.records.create(record, Body(prompt=b"", sampling=Sampling()))
                return task
            except BusError:
                await asyncio.sleep(0.05)

    async def ends(self, record: Record, at_s: float) -> None:
        while True:
            try:
                await self.records.change(record.key, lambda r: stopped(r, at_s))
                return
            except BusError:
                await asyncio.sleep(0.05)


def stopped(record: Record, at_s: float) -> Record | None:
    if record.verdict is not None:
        return None
    return ended(record, FinishReason.STOP, Resume(), at_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_admissions_that_race_count_the_rounds_alike_and_agree_when_the_task_began(
    seed: int,
) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        net = SimNet(random.Random(seed + 1), BAD)
        admissions = [Admission(net.connect(f"a{n}")) for n in range(3)]
        tasks = list[list[TaskSoFar]]()
        for number in range(ROUNDS):
            at_s = 20.0 * number
            together = [asked(f"{number}-{n}", at_s) for n in range(BESIDE)]
            takings = [rng.choice(admissions).takes_in(record) for record in together]
            tasks.append(await asyncio.gather(*takings))
            for record in together:
                await rng.choice(admissions).ends(record, at_s + 10.0)
        assert [{task.rounds for task in round_} for round_ in tasks] == [
            {number} for number in range(1, ROUNDS + 1)
        ]
        assert {task.began_unix_s for round_ in tasks for task in round_} == {0.0}

    run_virtual(main())


def test_sessions_and_tenants_are_tasks_of_their_own() -> None:
    async def main() -> None:
        admission = Admission(SimNet(random.Random(1)).connect("a"))
        first = await admission.takes_in(asked("a", 0.0, "s1"))
        other = await admission.takes_in(asked("b", 5.0, "s2"))
        tenant = made.record("u.c", slo=Slo(task_ttlt_s=600.0), session="s1", arrived_unix_s=7.0)
        assert first.began_unix_s == 0.0 and other.began_unix_s == 5.0
        assert (await admission.takes_in(tenant)).began_unix_s == 7.0

    run_virtual(main())


def test_a_damaged_task_is_said_with_its_key_and_no_other_session_waits() -> None:
    async def main() -> None:
        net = SimNet(random.Random(1), Faults())
        bus = net.connect("admission")
        tasks = TaskStore(bus.requests, Records(bus.requests, bus.bodies))
        await tasks.join(asked("a", 1.0))
        [(name, entry)] = net.requests.scan("t.", now_s=net.loop.time())
        await bus.requests.update(name, b"\xc1", entry.revision)
        with pytest.raises(StoreDamaged, match=name):
            await tasks.join(asked("b", 20.0))
        assert (await tasks.join(asked("c", 21.0, session="another"))).task.rounds == 1

    run_virtual(main())
