"""The main of every service: logs, configuration, metrics, signals, one bus connection."""

import asyncio
import gc
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

import msgspec
import uvloop

from shared.bus.api import Bus
from shared.bus.nats import NatsBus, connect
from shared.bus.users import Role, User
from shared.clock import Clock
from shared.errors import ConfigError, EngineError
from shared.process import logs
from shared.process.chores import before
from shared.process.configuration import load, load_watched, without_secrets
from shared.process.fleet_time import FleetTime
from shared.process.scrape import scraped
from shared.process.stopping import ended_in_time
from shared.process.upkeep import Upkeep
from shared.telemetry import tracing
from shared.telemetry.about import about
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import Tracing

C = TypeVar("C", bound=msgspec.Struct)
OPEN_FILES = 65_536  # enough for any service; the usual limit is 1,024


@dataclass(frozen=True)
class Process(Generic[C]):
    """The parts that a process gives to its service."""

    cfg: C
    bus: Bus
    clock: Clock
    stop: asyncio.Event  # set by SIGINT and SIGTERM
    tracing: Tracing
    rng: Random
    export: Callable[[Registry], None]  # call it with the service's registry, once


Body = Callable[[Process[C]], Awaitable[None]]
Check = Callable[[C], object]


def run(section: str, kind: type[C], body: Body[C], *checks: Check[C]) -> None:
    """Run a service until SIGINT or SIGTERM, then drain. A check that fails raises ConfigError."""
    if not told_settings(section, kind, *checks):
        run_until_stopped(section, _main(section, kind, body, checks))


def told_settings(section: str, kind: type[C], *checks: Check[C]) -> bool:
    """True if the process was asked for its settings; they have been printed as JSON."""
    if sys.argv[1:] != ["--settings"]:
        return False
    # imported here: a service that serves does not need it
    from shared.process.described import describe

    print(msgspec.json.encode(describe(section, kind, checks)).decode())
    return True


def run_until_stopped(section: str, main: Coroutine[Any, Any, None]) -> None:
    """Run `main`; exit with one clear line for what the operator must change, or a lost engine."""
    gc.collect()
    # Imported objects stay: a full collection of them takes 10 ms of an iteration.
    gc.freeze()
    # A collection usually walks 10,000 objects, for 0.5 ms. With the defaults (700, 10, 10) the
    # decoding of an 8 MiB message of millions of lists takes 2 s in place of 0.3.
    gc.set_threshold(10_000, 50, 100)
    _raise_open_files()
    try:
        uvloop.run(main)
    except* (ConfigError, EngineError) as group:
        sys.exit(f"{section}: {'; '.join(str(error) for error in _leaves(group))}")


def _raise_open_files() -> None:
    """Raise the limit of open files to OPEN_FILES, or as far as the system lets this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # a system with a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def stop_on_signals() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, stop.set)
    return stop


async def _main(section: str, kind: type[C], body: Body[C], checks: Sequence[Check[C]]) -> None:
    instance = f"{section}-{socket.gethostname()}-{os.getpid()}"
    logs.configure(section, instance)
    cfg = load(kind, section)
    for check in checks:
        check(cfg)
    watched, registries = load_watched(section), [about(section)]
    traces = tracing.configure(section, instance)
    stop = stop_on_signals()
    log = logs.logger()
    log.info("service.started", config=without_secrets(cfg))
    server: Any = cfg  # every section has these fields
    user = User(Role(section), getattr(cfg, "replica", ""))

    async def serve(bus: NatsBus) -> None:
        rng, clock, timing = Random(secrets.randbits(64)), Clock(), Registry()
        registries.append(timing)
        time = FleetTime(bus, clock, section, instance, timing)
        await time.begin()
        process = Process(cfg, bus, clock, stop, traces, rng, registries.append)
        upkeep = Upkeep(bus, clock, timing, server.tls_ca)
        keeping = [asyncio.ensure_future(each) for each in (time.keep(), upkeep.run())]
        task = asyncio.ensure_future(body(process))
        try:
            await asyncio.wait((task, bus.failed, *keeping), return_when=asyncio.FIRST_COMPLETED)
            ended = [each for each in (task, *keeping, bus.failed) if each.done()]
        finally:
            for each in (task, *keeping):
                each.cancel()
            await asyncio.wait((task,), timeout=1.0)
        ended[0].result()

    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(scraped(watched, registries))
            connection = connect(
                server.url, instance, user, creds=server.creds, tls_ca=server.tls_ca
            )
            bus = await before(stop, stack.enter_async_context(connection))
            if bus is not None:
                await ended_in_time(serve(bus), bus, stop, server.drain_s)
    finally:
        traces.close()
    log.info("service.stopped")


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
