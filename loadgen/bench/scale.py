"""The load that one planner, one admission and one gateway carry, and two of each.

The service is a process of its own on a real NATS server; a stand-in in this process plays the rest
of the fleet. Beside each rate stands the CPU time of one unit, which other work on the machine
hardly changes: its inverse is the rate of a core that does nothing else.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

from loadgen.bench.beside import Beside
from loadgen.bench.beside_admission import BesideAdmission
from loadgen.bench.beside_gateway import BesideGateway
from loadgen.bench.beside_planner import ITERATION_S, REPLICAS, BesidePlanner
from loadgen.bench.figure import Figure
from loadgen.bench.machine import cpu_s
from loadgen.fleet.child import Child, Say
from loadgen.fleet.nats_server import NatsServer
from loadgen.fleet.ports import free_port
from shared.bus.nats import NatsBus, connect
from shared.clock import Clock

MEASURE_S, QUICK_S = 8.0, 1.0
SETTLE_S = 1.0
POLL_S = 0.02


class Section(NamedTuple):
    """One service. `of_a_core` names what one core serves by the CPU of a unit: a unit's
    `unit_s` of it each.
    """

    service: str
    stand_in: type[Beside]
    ready: str  # in the line that the service logs once it works
    rate: str
    rate_unit: str
    unit: str
    of_a_core: str
    unit_s: float = 1.0
    least: float | None = None  # of those that a core serves


SECTIONS = (
    Section(
        "planner",
        BesidePlanner,
        '"planner.ready"',
        "iterations planned",
        "/s",
        "an iteration",
        f"replicas of a core, by that CPU, at {1e3 * ITERATION_S:.0f} ms",
        ITERATION_S,
        REPLICAS,
    ),
    Section(
        "admission",
        BesideAdmission,
        '"door.open"',
        "requests brought in and ended",
        "/s",
        "a request",
        "requests of a core, by that CPU",
    ),
    Section(
        "gateway",
        BesideGateway,
        '"service.ready"',
        "tokens streamed, an event each",
        "tokens/s",
        "a token",
        "tokens of a core, by that CPU",
        least=20_000,
    ),
)


async def measure(quick: bool, seed: int, say: Say) -> list[Figure]:
    return [
        figure
        for section in SECTIONS
        for processes in (1, 2)
        for figure in await _measured(section, processes, quick, Random(seed), say)
    ]


async def _measured(
    section: Section, processes: int, quick: bool, rng: Random, say: Say
) -> list[Figure]:
    clock, ports = Clock(), [free_port() for _ in range(processes)]
    async with (
        _lone_services(section, ports, say) as (bus, services),
        section.stand_in(bus, clock, rng, ports) as beside,
    ):
        await beside.load(quick)
        await asyncio.sleep(SETTLE_S)
        beside.reset()
        began_unix_s, began_cpu_s = clock.unix_s(), _cpu_s(services)
        await asyncio.sleep(QUICK_S if quick else MEASURE_S)
        done = beside.done
        took_s, used_s = clock.unix_s() - began_unix_s, _cpu_s(services) - began_cpu_s
        part = f"scale, {section.service}"
        prefix = f"{processes} of them: " if processes > 1 else ""
        more = beside.figures(part, prefix)
    say(f"  {processes} x {section.service}: {done / took_s:,.0f}/s, {section.rate}")
    each_s = used_s / done if done else None
    of_a_core = section.unit_s / each_s if each_s else None
    note = f"{beside.note}; {used_s / took_s:.2f} cores"
    least = section.least if processes == 1 else None
    return [
        Figure(part, f"{prefix}{section.rate}", done / took_s, section.rate_unit, note=note),
        *more,
        Figure(part, f"{prefix}CPU of {section.unit}", each_s, "us"),
        Figure(part, f"{prefix}{section.of_a_core}", of_a_core, "", least=least),
    ]


@asynccontextmanager
async def _lone_services(
    section: Section, ports: list[int], say: Say
) -> AsyncIterator[tuple[NatsBus, list[Child]]]:
    """A NATS server without keys, a connection to it, and a process of the service for each port.

    The processes are killed at the end: what is under way is of no interest.
    """
    server, keepers = NatsServer(), list[asyncio.Task[None]]()
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as folder:
        url = server.start(Path(folder) / "nats")
        services = [
            Child(
                f"{section.service}-{port}",
                [sys.executable, "-m", f"services.{section.service}"],
                {**os.environ, **_environment(url, port)},
                Path(folder) / f"{port}.jsonl",
                say,
            )
            for port in ports
        ]
        try:
            async with connect(url, "slackline-bench") as bus:
                await bus.make_streams([])
                for service in services:
                    keepers.append(asyncio.create_task(service.keep(), name=service.name))
                    while section.ready not in service.output():
                        if keepers[-1].done():
                            keepers[-1].result()
                        await asyncio.sleep(POLL_S)
                    service.patient = True
                yield bus, services
        finally:
            for service in services:
                service.abandon()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            server.stop()


def _environment(url: str, port: int) -> Mapping[str, str]:
    return {
        "SLACKLINE_URL": url,
        "SLACKLINE_GATEWAY_PORT": str(port),
        "SLACKLINE_PLANNER_MAX_REPLICAS": str(REPLICAS),
    }


def _cpu_s(services: list[Child]) -> float:
    """The CPU seconds that they have used since they began."""
    used = [cpu_s(child.pid) for child in services if child.pid is not None]
    return sum(seconds for seconds in used if seconds is not None)
