"""Tests of several models in one fleet: a request goes only to replicas of its model, whatever
happens, and one whose model has left ends.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from shared.bus.api import RefusedError
from shared.client.client import Client, Handle, Patience
from shared.schemas import Verdict
from shared.vocabulary import Slo
from tests.fleet.live import HOPELESS, request_for
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World, run
from tests.simulated.virtual_loop import run_virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

LONG = Slo(ttlt_s=3600.0)
RETURN_S = 20.0


@pytest.mark.parametrize("block", range(3))
def test_a_request_is_only_ever_held_by_replicas_of_its_model(block: int) -> None:
    """Planners, admissions and relegation serve both models while anything may die; each end and
    each ack is checked, as of a fleet with one.
    """
    scene = Scene(replicas=4, models=("a", "b"), requests=16, kills=5, over_s=3.0)
    for seed in range(10 * block, 10 * (block + 1)):
        run(seed, scene)


def play(main: Callable[[World, Client], Awaitable[None]], *, admissions: int = 1) -> None:
    """r0 serves the model a, r1 the model b."""

    async def begin() -> None:
        scene = Scene(policy="slackline", models=("a", "b"), return_s=RETURN_S, faults=CALM)
        world = World(scene, seed=1)
        for kind in ("planner-0", "relegation-0", "worker-r0", "worker-r1"):
            world.start(kind)
        for n in range(admissions):
            world.start(f"admission-{n}")
        patience = Patience(give_up_s=600.0, submit_s=60.0)
        async with Client(world.net.connect("clients"), world.net.clock, patience=patience) as one:
            await asyncio.sleep(5.0)
            await main(world, one)

    run_virtual(begin())


async def submitted(client: Client, name: str, model: str | None, slo: Slo = LONG) -> Handle:
    request = request_for(40, name, prompt="hi", model=model, slo=slo)
    return await client.submit(request, "chat")


async def refusal(client: Client, name: str, model: str | None) -> tuple[str, str]:
    with pytest.raises(RefusedError) as caught:
        await submitted(client, name, model)
    return caught.value.refused.code, caught.value.refused.message


async def ended(handle: Handle) -> Verdict:
    async with asyncio.timeout(200.0):
        return await handle.wait()


def test_with_several_models_a_request_names_one() -> None:
    async def main(world: World, client: Client) -> None:
        code, message = await refusal(client, "q0", None)
        assert code == "invalid_request_error"
        assert "`a`, `b`" in message
        assert (await refusal(client, "q1", "c"))[0] == "model_not_found"
        verdict = await ended(await submitted(client, "q2", "b"))
        assert (verdict.finish_reason, verdict.replica) == ("length", "r1")

    play(main)


def test_a_request_waits_for_its_model_to_come_back_and_goes_nowhere_else() -> None:
    async def main(world: World, client: Client) -> None:
        world.down_s = RETURN_S / 2
        world.processes["worker-r1"].kill()
        await asyncio.sleep(5.0)
        waits = await submitted(client, "q0", "b")
        best_effort = await submitted(client, "q1", "b", HOPELESS)
        assert (await ended(await submitted(client, "q2", "a"))).replica == "r0"
        for handle in (waits, best_effort):
            verdict = await ended(handle)
            assert (verdict.finish_reason, verdict.replica) == ("length", "r1")

    play(main)


def test_a_model_that_leaves_is_unknown_and_its_requests_end() -> None:
    """Those that wait, those that its replica had begun, and those that come after."""

    async def main(world: World, client: Client) -> None:
        begun = await client.submit(
            request_for(4000, "q0", prompt="hi", model="b", slo=LONG), "chat"
        )
        await asyncio.sleep(1.0)
        world.down_s = 1e6
        world.processes["worker-r1"].kill()
        await asyncio.sleep(RETURN_S / 2)
        waiting = await submitted(client, "q1", "b")
        for handle in (begun, waiting):
            verdict = await ended(handle)
            assert verdict.finish_reason == "invalid"
            assert verdict.message == "No replica serves the model `b` any more"
        assert (await refusal(client, "q2", "b"))[0] == "model_not_found"
        # the one that is left needs no name any more
        assert (await ended(await submitted(client, "q3", None))).replica == "r0"

    play(main)


def test_a_fleets_only_model_never_leaves() -> None:
    async def main(world: World, client: Client) -> None:
        world.down_s = 1e6
        world.processes["worker-r1"].kill()
        await asyncio.sleep(2 * RETURN_S)
        world.down_s = 3 * RETURN_S
        world.processes["worker-r0"].kill()
        await asyncio.sleep(2 * RETURN_S)
        assert (await ended(await submitted(client, "q0", "a"))).finish_reason == "length"

    play(main)


def test_a_new_model_is_served_by_the_services_that_run() -> None:
    async def main(world: World, client: Client) -> None:
        assert (await refusal(client, "q0", "c"))[0] == "model_not_found"
        world.scene = replace(world.scene, models=("a", "b", "c"))
        world.start("worker-r2")
        await asyncio.sleep(2.0)
        verdict = await ended(await submitted(client, "q1", "c"))
        assert (verdict.finish_reason, verdict.replica) == ("length", "r2")

    play(main)


def test_a_replica_that_comes_back_with_another_model_serves_that() -> None:
    """The requests of its former model wait for a replica of that one."""

    async def main(world: World, client: Client) -> None:
        begun = await client.submit(
            request_for(4000, "q0", prompt="hi", model="b", slo=LONG), "chat"
        )
        await asyncio.sleep(1.0)
        world.scene = replace(world.scene, models=("a",))
        world.processes["worker-r1"].kill()
        await asyncio.sleep(5.0)
        world.processes["worker-r0"].kill()
        world.down_s = 1e6
        verdict = await ended(await submitted(client, "q1", "a"))
        assert (verdict.finish_reason, verdict.replica) == ("length", "r1")
        assert (await ended(begun)).finish_reason == "invalid"

    play(main)
