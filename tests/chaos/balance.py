"""Checks a fleet after a fault: no request, process or lease is lost, doubled or left over."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import nats.errors

from shared.bus.nats import NatsBus
from shared.schemas import Record
from shared.store.leases import holders
from shared.subjects import planner_lease
from tests.chaos.faults import Arena
from tests.fleet.live import WAIT_S, Delivered, Wire, check, until_idle
from tests.fleet.processes import children_of

# events of a service's log that say that its own books did not balance, or that it broke
FAULTS_OF_OURS = ("core.broken", "seat.broken", "handler.failed", "Traceback")


async def balance(arena: Arena, bus: NatsBus, wire: Wire, delivered: Sequence[Delivered]) -> None:
    """Check everything, once the fleet is at rest. Raises AssertionError."""
    fleet = arena.fleet
    await check(bus, wire, delivered)
    await until_idle(bus, fleet.replicas)
    await until(lambda: _leases(arena, bus))
    await until(lambda: _records(bus, arena.known))
    await until(lambda: _consumers(bus))
    await until(lambda: _processes(arena))
    for child in fleet.processes:
        for fault in FAULTS_OF_OURS:
            assert fault not in child.output(), f"{child.name}: {fault}"
    if fleet.failed.done():
        fleet.failed.result()


async def until(
    difference: Callable[[], Coroutine[Any, Any, str]], within_s: float = WAIT_S
) -> None:
    """Wait until there is no difference; raises AssertionError with the last one."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while said := await difference():
        assert loop.time() < until_s, said
        await asyncio.sleep(0.1)


async def _processes(arena: Arena) -> str:
    """Say which processes are too many and which are missing."""
    wanted = {child.pid: child.name for child in arena.fleet.processes}
    wanted |= {broker.pid: "broker" for broker in arena.brokers}
    found = set(children_of(os.getpid())) - arena.others
    extra = [_command(pid) for pid in found - wanted.keys()]
    missing = [name for pid, name in wanted.items() if pid not in found]
    return f"processes too many: {extra}, missing: {missing}" if extra or missing else ""


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return f"{pid}, ended"
    return f"{pid}: {b' '.join(words).decode()}"


async def _leases(arena: Arena, bus: NatsBus) -> str:
    """Say how the leases differ from one for each replica, one for each admission and one for
    relegation.
    """
    planners = await holders(bus.leases, "planner.")
    admissions = await holders(bus.leases, "admission.")
    leads = await bus.leases.get("relegation")
    wanted = sorted(planner_lease(replica) for replica in arena.fleet.replicas)
    right = sorted(planners) == wanted and len(admissions) == arena.fleet.spec.admissions and leads
    return "" if right else f"leases: {planners}, {admissions}, {leads}"


async def _records(bus: NatsBus, known: set[str]) -> str:
    """Say which records have not ended or are of nobody, and which outputs and bodies are left. An
    output outlives its record by some seconds.
    """
    named: set[str] = set()
    remembered: set[str] = set()
    for key, entry in await bus.requests.scan("s."):
        record = msgspec.msgpack.decode(entry.value, type=Record)
        if record.verdict is None:
            return f"{key} has not ended"
        if key.rpartition(".")[2] not in known:
            return f"{key} is of nobody"
        named.add(record.output_key)
        remembered.add(record.key)
    left = [
        name
        for name, _ in await bus.requests.scan("o.")
        if name not in named and ".".join(name.split(".")[1:3]) in remembered
    ]
    left += [key for key, _ in await bus.bodies.scan("")]
    return f"left over: {left}" if left else ""


async def _consumers(bus: NatsBus) -> str:
    """Say which streams have consumers: no service leaves one."""
    try:
        infos = await bus._client.jetstream().streams_info()
    except nats.errors.TimeoutError:  # a broker that has come back may still be catching up
        return "the brokers do not list their streams"
    left = [info.config.name for info in infos if info.state.consumer_count]
    return f"consumers of {left}" if left else ""
