"""Tests of the turns in which admissions sweep: each open record has one reader at a time."""

import asyncio
from collections import Counter

import pytest

from services.admission.sweep import Sweep
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.simulated.virtual_loop import run_virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

ADMISSIONS = ("admission-0", "admission-1", "admission-2")


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The sweeps of all instances: the turn, and whose."""
    found: list[tuple[int, str]] = []
    sweep = Sweep._sweep_once

    async def noted(self: Sweep) -> None:
        found.append((int(self._clock.unix_s() // self._cfg.sweep_s), self._owner))
        await sweep(self)

    monkeypatch.setattr(Sweep, "_sweep_once", noted)
    return found


async def began() -> World:
    world = World(Scene(policy="fcfs", faults=CALM), seed=1)
    for kind in (*ADMISSIONS, "planner-0", "relegation-0", "worker-r0"):
        world.start(kind)
    await asyncio.sleep(10.0)
    return world


def test_in_calm_one_admission_sweeps_at_a_time_and_each_in_its_turn(
    swept: list[tuple[int, str]],
) -> None:
    async def main() -> None:
        await began()
        swept.clear()
        await asyncio.sleep(60.0)

    run_virtual(main())
    turns = [turn for turn, _ in swept]
    assert turns == list(range(turns[0], turns[0] + 30))
    assert set(Counter(owner for _, owner in swept).values()) == {10}


def test_the_turns_of_one_that_is_gone_are_the_others(swept: list[tuple[int, str]]) -> None:
    async def main() -> None:
        world = await began()
        world.processes["admission-1"].pause()  # its machine is gone: its lease has to run out
        swept.clear()
        await asyncio.sleep(60.0)

    run_virtual(main())
    turns = Counter(turn for turn, _ in swept)
    first = min(turns)
    missed = [turn for turn in range(first, first + 30) if turn not in turns]
    assert len(missed) <= 2  # of the lease's 3 s, at 2 s a turn
    assert max(missed, default=first) <= first + 2
    again = [turn for turn, number in turns.items() if number > 1]
    assert len(again) <= 2  # both sweep soon after the death
    assert len({owner for _, owner in swept}) == 2
