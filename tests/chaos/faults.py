"""The faults of `make chaos`, by name: each is done to a fleet under load, undone where needed."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from loadgen.fleet.child import Child
from loadgen.fleet.fleet import Fleet
from tests.chaos.lines import Lines
from tests.infra.full_disk import Disk

SABOTAGE = str(Path(__file__).parent / "sabotage")
SHORT_S, LONG_S = 1.0, 5.0  # within what leases and heartbeats forgive, and beyond it
SERVICES = ("planner", "admission", "relegation", "worker-r1")
ONE = ("nats-server",)
THREE = ("broker-1", "broker-2", "broker-3")


@dataclass
class Arena:
    """A fleet under attack: its processes, its brokers, and the lines between them."""

    fleet: Fleet
    lines: Lines
    brokers: Sequence[Child]
    disk: Disk | None = None
    others: frozenset[int] = frozenset()  # processes of ours that are not of this fleet
    known: set[str] = field(default_factory=set)  # the ids of all requests so far

    def child(self, name: str) -> Child:
        return next(c for c in (*self.fleet.processes, *self.brokers) if c.name == name)

    def pid(self, name: str) -> int:
        pid = self.child(name).pid
        assert pid is not None, f"{name} is not running"
        return pid


Act = Callable[[Arena], Awaitable[None]]


def kill(*names: str) -> Act:
    async def act(arena: Arena) -> None:
        for name in names:
            arena.child(name).kill()

    return act


def restart(*names: str) -> Act:
    async def act(arena: Arena) -> None:
        await asyncio.gather(*(arena.child(name).restart() for name in names))

    return act


def pause(name: str, for_s: float) -> Act:
    async def act(arena: Arena) -> None:
        child = arena.child(name)
        child.send(signal.SIGSTOP)
        await asyncio.sleep(for_s)
        child.send(signal.SIGCONT)

    return act


def part(name: str, for_s: float) -> Act:
    """Cut the process off from all others; its connections stay."""

    async def act(arena: Arena) -> None:
        with arena.lines.holding(arena.pid(name)):
            await asyncio.sleep(for_s)

    return act


def delay(name: str, by_s: float, for_s: float) -> Act:
    async def act(arena: Arena) -> None:
        with arena.lines.delaying(by_s, arena.pid(name)):
            await asyncio.sleep(for_s)

    return act


def cut(name: str) -> Act:
    """Reset the connections of the process."""

    async def act(arena: Arena) -> None:
        arena.lines.cut(arena.pid(name))

    return act


def fill(for_s: float) -> Act:
    async def act(arena: Arena) -> None:
        assert arena.disk is not None, "this fleet's store is on no small disk"
        arena.disk.fill()
        await asyncio.sleep(for_s)
        arena.disk.clear()

    return act


def spoil(name: str, variable: str, value: str, for_s: float) -> Act:
    """Start the process again with a fault inside (tests/chaos/sabotage), and then without."""

    async def act(arena: Arena) -> None:
        child = arena.child(name)
        before = dict(child.environment)
        child.environment |= {
            "PYTHONPATH": f"{SABOTAGE}:{before.get('PYTHONPATH', '')}",
            variable: value,
        }
        child.kill()
        await asyncio.sleep(for_s)
        child.environment = before
        child.kill()

    return act


def of_one_broker() -> dict[str, Act]:
    """The faults of a fleet on one nats-server."""
    names = (*SERVICES, *ONE)
    faults: dict[str, Act] = {}
    for name in names:
        faults[f"kill {name}"] = kill(name)
        faults[f"restart {name}"] = restart(name)
        faults[f"pause {name} {SHORT_S:g} s"] = pause(name, SHORT_S)
        faults[f"pause {name} {LONG_S:g} s"] = pause(name, LONG_S)
    for one, other in combinations(names, 2):
        faults[f"kill {one} and {other}"] = kill(one, other)
    for name in SERVICES:
        faults[f"part {name} {SHORT_S:g} s"] = part(name, SHORT_S)
        faults[f"part {name} {LONG_S:g} s"] = part(name, LONG_S)
        faults[f"cut {name}"] = cut(name)
        faults[f"delay {name} 0.1 s"] = delay(name, 0.1, 2.0)
    for name in ("planner", "admission", "worker-r1"):
        faults[f"skew {name} +1 s"] = spoil(name, "CHAOS_SKEW_S", "1", LONG_S)
        faults[f"skew {name} -1 s"] = spoil(name, "CHAOS_SKEW_S", "-1", LONG_S)
    for how in ("slow", "wrong"):
        faults[f"{how} acks of worker-r1"] = spoil("worker-r1", "CHAOS_ACKS", how, LONG_S)
    faults["fill the disk"] = fill(3.0)
    return faults


def of_three_brokers() -> dict[str, Act]:
    """The faults of a fleet on a cluster."""
    faults: dict[str, Act] = {}
    for name in THREE:
        faults[f"kill {name}"] = kill(name)
        faults[f"pause {name} {SHORT_S:g} s"] = pause(name, SHORT_S)
        faults[f"part {name} {LONG_S:g} s"] = part(name, LONG_S)
    for one, other in combinations(THREE, 2):
        faults[f"kill {one} and {other}"] = kill(one, other)
    for name in SERVICES:
        faults[f"kill {name} and broker-1"] = kill(name, "broker-1")
    faults["restart broker-2"] = restart("broker-2")
    faults["kill all brokers"] = kill(*THREE)
    return faults
