"""What every service's main does: logs, configuration, signals, one bus connection, and an end that says why."""

import asyncio
import gc
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

import msgspec
import uvloop

from shared import logs, telemetry
from shared.bus.api import Bus
from shared.bus.nats import connect
from shared.clock import Clock
from shared.config import load, without_secrets
from shared.errors import ConfigError
from shared.telemetry import Tracing

C = TypeVar("C", bound=msgspec.Struct)

Body = Callable[[C, Bus, Clock, asyncio.Event, Tracing, Random], Awaitable[None]]


def run(section: str, kind: type[C], body: Body[C]) -> None:
    """Run a service until SIGINT or SIGTERM, then let it drain. Exits with a clear line for whatever the operator must change."""
    try:
        uvloop.run(_main(section, kind, body))
    except* ConfigError as group:
        sys.exit(f"{section}: {'; '.join(str(error) for error in _leaves(group))}")


async def _main(section: str, kind: type[C], body: Body[C]) -> None:
    instance = f"{section}-{socket.gethostname()}-{os.getpid()}"
    logs.configure(section, instance)
    cfg = load(kind, section)
    tracing = telemetry.configure(section, instance)
    stop = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, stop.set)
    log = logs.logger()
    log.info("service.started", config=without_secrets(cfg))
    gc.collect()
    gc.freeze()  # what was imported stays: a full collection would walk all of it, for 10 ms in the middle of an iteration
    connected = asyncio.Event()

    async def serve() -> None:
        async with connect(cfg.url, instance) as bus:  # type: ignore[attr-defined]
            connected.set()
            task = asyncio.ensure_future(body(cfg, bus, Clock(), stop, tracing, Random(secrets.randbits(64))))
            await asyncio.wait((task, bus.failed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=1.0)
                await bus.failed
            await task

    serving, stopped = asyncio.ensure_future(serve()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not connected.is_set():
            serving.cancel()  # told to stop before any server answered
        with suppress(asyncio.CancelledError):
            await serving
    finally:
        stopped.cancel()
        tracing.close()
    log.info("service.stopped")


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
