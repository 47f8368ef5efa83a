"""Tests of a simulated fleet whose hosts' clocks are wrong, or jump: it keeps one time."""

import asyncio
import random
from dataclasses import replace

import pytest

from services.gateway.clocks import Clocks
from shared.process.fleet_time import SYNC_S, UNREADY_S, FleetTime
from shared.schemas import TimeTold
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World, run
from tests.rings import slow_but
from tests.simulated.bus import SimNet
from tests.simulated.process import SimProcess
from tests.simulated.virtual_loop import run_virtual, virtual

YEAR_S = 365 * 86_400.0
QUIET = Scene(
    faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, requests=8, keeps_time=True
)  # enough replicas: each SLO that an idle replica can hold is kept
NEAR_S = 0.02  # round trips of the simulated bus are some ms


def check_verdicts(world: World) -> int:
    """Count the requests with an SLO that can be held. Raises AssertionError unless each met it, or
    moved to another replica, and each verdict's times can be true.
    """
    served = 0
    for name, seen in world.seen.items():
        if not seen.ends:
            continue
        verdict, slo = seen.ends[0].verdict, world.requests[name].slo
        assert verdict.ttft_s is None or 0.0 <= verdict.ttft_s <= verdict.ttlt_s < 60.0, name
        if slo.ttft_s == 0.3 or slo.ttlt_s == 5.0:
            assert verdict.slo_met or verdict.attempts > 1, (name, verdict)
            served += 1
    return served


@pytest.mark.parametrize("off_s", slow_but([-30.0, YEAR_S], [-30.0, YEAR_S, 150.0, -YEAR_S]))
def test_a_fleet_serves_in_time_whichever_clocks_are_off(off_s: float) -> None:
    """The clocks of half the hosts are off, drawn anew for each seed."""
    for seed in range(3):
        assert check_verdicts(run(seed, replace(QUIET, skew_s=off_s))) > 2


@pytest.mark.parametrize("jump_s", slow_but([-2.0], [-2.0, 150.0, -YEAR_S]))
def test_a_jump_of_clocks_while_it_runs_harms_no_request(jump_s: float) -> None:
    """The broker's clock jumps, and those of half the hosts; some processes begin after that."""
    for seed in range(3):
        scene = replace(QUIET, jump_s=jump_s, over_s=30.0, kills=3, requests=12)
        assert check_verdicts(run(seed, scene)) > 3


def test_a_storm_over_clocks_that_are_off_breaks_nothing() -> None:
    for seed in range(10):
        run(seed, Scene(keeps_time=True, skew_s=3600.0, over_s=15.0))


def agreed(skews_s: dict[str, float], *, jump_s: float = 0.0, lost_s: float = 0.0) -> list[float]:
    """The clocks of these processes minus the time of the broker as it was before it jumped. The
    last process begins after the jump; `lost_s`: the first one's clock stood still for so long.
    """

    async def main() -> list[float]:
        net = SimNet(random.Random(0))
        true = SimProcess("true").clock
        made: list[SimProcess] = []

        async def live(process: SimProcess) -> None:
            service = process.name.partition("-")[0]
            time = FleetTime(
                net.connect(process.name, process), process.clock, service, process.name
            )
            await time.begin()
            await time.keep()

        for name, skew_s in skews_s.items():
            if len(made) == len(skews_s) - 1:
                await asyncio.sleep(1.0)
                net.clock.move(jump_s)
                made[0].clock.move(-lost_s)
            made.append(SimProcess(name, skew_s=skew_s))
            made[-1].start(live(made[-1]))
            await asyncio.sleep(1.0)
        await asyncio.sleep(4 * SYNC_S)
        return [process.clock.unix_s() - true.unix_s() for process in made]

    return run_virtual(main())


FOUR = {"admission-1": 150.0, "planner-1": -3600.0, "worker-1": YEAR_S, "worker-2": 5.0}


@pytest.mark.parametrize("jump_s", [0.0, 2.0, -150.0, YEAR_S])
def test_all_keep_the_time_that_they_had_also_those_who_come_after_a_jump(jump_s: float) -> None:
    assert agreed(FOUR, jump_s=jump_s) == pytest.approx([0.0] * 4, abs=NEAR_S)


@pytest.mark.parametrize("lost_s", [0.5, 2.0, 3600.0])
def test_who_stood_still_alone_takes_the_time_of_the_others(lost_s: float) -> None:
    """A virtual machine was paused. Less than a second is made up for by slewing."""
    late = agreed(FOUR, lost_s=lost_s)
    assert late[1:] == pytest.approx([0.0] * 3, abs=NEAR_S)
    assert abs(late[0]) < (lost_s if lost_s < 1.0 else NEAR_S)


@virtual()
async def test_a_service_whose_every_host_is_off_makes_the_gateway_unready_and_is_named() -> None:
    clocks = Clocks(SimProcess("gateway").clock)

    def told(instance: str, ahead_s: float, service: str = "planner") -> str:
        clocks.hear(TimeTold(service=service, instance=instance, unix_s=0.0, host_ahead_s=ahead_s))
        return clocks.off()

    first, off, two, both, others = [
        told("planner-a", UNREADY_S - 1),
        told("planner-a", UNREADY_S + 1),
        told("planner-b", 0.0),  # another can be trusted
        told("planner-b", -150.0),
        told("worker-a", 0.0, "worker"),
    ]
    await asyncio.sleep(5 * SYNC_S)  # nothing more is heard of them
    assert (first, two, clocks.off()) == ("", "", "")
    assert "planner (planner-a)" in off
    assert "11 s ahead" in off
    assert "planner" in both
    assert "planner" in others
