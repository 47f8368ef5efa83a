"""Tests of the role of a replica: its worker's, or, for `auto`, what relegation tells."""

import asyncio
from random import Random

import pytest

from services.planner.config import PlannerConfig
from services.planner.service import Planner
from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.schemas import Digest, ReplicasNeeded, Resync, ResyncPage
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import ReplicaId, Role
from tests import made
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import run_virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing


def needed(*prefill: str) -> ReplicasNeeded:
    return ReplicasNeeded(
        model="m", at_unix_s=0.0, replicas=2, tier="", why="", tiers=[], serving=2, ahead_s=1.0,
        prefill=tuple(ReplicaId(name) for name in prefill),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("role", "shown"),
    [
        (Role.AUTO, [Role.BOTH, Role.PREFILL, Role.BOTH]),
        (Role.DECODE, [Role.DECODE, Role.DECODE, Role.DECODE]),
    ],
)
def test_a_replica_shows_the_role_that_it_has_now(role: Role, shown: list[Role]) -> None:
    digests: list[Digest] = []
    announced = made.announce("r1", model="m", profile="a100-llama3-8b", role=role)
    seen: list[Role] = []

    async def beat(net: SimNet) -> None:
        """The heartbeats and the resyncs of the worker."""
        worker = net.connect("worker")
        replies: list[asyncio.Future[None]] = []

        def answer(resync: Resync, call: Call) -> None:
            page = ResyncPage(announce=announced, next_seq=1, ack_seq=0, entries=[], more=False)
            replies.append(asyncio.ensure_future(call.reply(page)))

        asked = Endpoint("resync", subjects.resync(announced.replica), Resync, answer)
        await worker.serve("worker", [asked], {})
        while True:
            await worker.publish(subjects.announce(announced.replica), announced)
            await asyncio.sleep(0.5)

    async def main() -> None:
        net, stop = SimNet(Random(0)), asyncio.Event()
        fleet = net.connect("fleet")
        await fleet.subscribe(subjects.DIGESTS, Digest, lambda digest, _: digests.append(digest))
        planner = Planner(
            PlannerConfig(policy="fcfs"), net.connect("planner"), net.clock, Tracing(), Random(1)
        )
        tasks = [asyncio.create_task(planner.run(stop)), asyncio.create_task(beat(net))]
        await asyncio.sleep(3.0)
        seen.append(digests[-1].role)
        for told in (needed("r1", "r2"), needed("r2")):
            await fleet.publish(subjects.SCALING, told)
            await asyncio.sleep(2.0)
            seen.append(digests[-1].role)
        stop.set()
        await tasks[0]
        tasks[1].cancel()

    run_virtual(main())
    assert seen == shown
