"""Tests of what relegation tells about the replicas needed: a message for each model it knows."""

import asyncio
from random import Random

from services.relegation.scaling import EVERY_S, Scaling
from shared import subjects
from shared.process.chores import Chores
from shared.schemas import ReplicasNeeded, TierArrivals, WorkArrived
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry
from tests import made
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import run_virtual


def test_work_whose_model_was_not_known_yet_is_that_of_the_only_model() -> None:
    heard: list[ReplicasNeeded] = []
    shown: list[float] = []
    work = WorkArrived(
        model="", tiers=[TierArrivals("chat", 90, 90_000, 9e7, 90.0, 900.0, 0, 90.0)]
    )

    async def main() -> None:
        net = SimNet(Random(0))
        fleet, metrics = net.connect("fleet"), Registry()
        scaling = Scaling(net.connect("relegation"), net.clock, 30.0, metrics, lambda: True)
        await fleet.subscribe(subjects.SCALING, ReplicasNeeded, lambda told, _: heard.append(told))
        async with Chores() as chores:
            await scaling.listen(chores)
            telling = asyncio.create_task(scaling.run())
            await fleet.publish(subjects.ARRIVED, work)  # before any worker was heard
            await asyncio.sleep(2 * EVERY_S)
            assert heard == []
            announced = made.announce(model="m", profile="a100-llama3-8b")
            await fleet.publish(subjects.announce(announced.replica), announced)
            scaling.heard(made.digest(model="m"))
            await asyncio.sleep(0.1)
            for _ in range(20):
                await fleet.publish(subjects.ARRIVED, work)
                await asyncio.sleep(EVERY_S)
            shown.extend(
                float(line.rpartition(" ")[2])
                for line in exposition([metrics], "")[1].splitlines()
                if line.startswith('slackline_replicas_needed{model_name="m",tier="chat"}')
            )
            telling.cancel()

    run_virtual(main())
    assert {told.model for told in heard} == {"m"}
    assert heard[0].replicas == 1 < heard[-1].replicas
    assert heard[-1].tier == "chat"
    assert shown == [heard[-1].replicas]
