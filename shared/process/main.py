"""What every service's main does: logs, configuration, metrics, signals, one bus connection, and an
end that says why.
"""

import asyncio
import gc
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TypeVar

import msgspec
import uvloop

from shared.bus.api import Bus
from shared.bus.nats import connect
from shared.clock import Clock
from shared.errors import ConfigError, EngineError
from shared.process import logs, tracing
from shared.process.configuration import Watched, load, load_watched, without_secrets
from shared.process.instruments import Registry
from shared.process.telemetry import Tracing

C = TypeVar("C", bound=msgspec.Struct)

Export = Callable[[Registry], None]  # call it with the process's registry, once
Body = Callable[[C, Bus, Clock, asyncio.Event, Tracing, Random, Export], Awaitable[None]]

SCRAPE_WITHIN_S = 5.0  # for one question; scrapers ask every 5 s or less often
SCRAPE_LIMIT_BYTES = 16 * 1024  # of a question


def run(section: str, kind: type[C], body: Body[C]) -> None:
    """Run a service until SIGINT or SIGTERM, then let it drain.

    Exits with a clear line for whatever the operator must change, and where its engine is gone.
    """
    try:
        uvloop.run(_main(section, kind, body))
    except* (ConfigError, EngineError) as group:
        sys.exit(f"{section}: {'; '.join(str(error) for error in _leaves(group))}")


async def _main(section: str, kind: type[C], body: Body[C]) -> None:
    instance = f"{section}-{socket.gethostname()}-{os.getpid()}"
    logs.configure(section, instance)
    cfg = load(kind, section)
    watched, registries = load_watched(section), list[Registry]()
    traces = tracing.configure(section, instance)
    stop = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, stop.set)
    log = logs.logger()
    log.info("service.started", config=without_secrets(cfg))
    gc.collect()
    # what was imported stays: a full collection would walk all of it, for 10 ms in the middle of an
    # iteration
    gc.freeze()
    connected = asyncio.Event()

    async def serve() -> None:
        async with scraped(watched, registries), connect(cfg.url, instance) as bus:  # type: ignore[attr-defined]
            connected.set()
            task = asyncio.ensure_future(
                body(
                    cfg,
                    bus,
                    Clock(),
                    stop,
                    traces,
                    Random(secrets.randbits(64)),
                    registries.append,
                )
            )
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
        traces.close()
    log.info("service.stopped")


@asynccontextmanager
async def scraped(watched: Watched, registries: list[Registry]) -> AsyncIterator[str]:
    """Answer GET /metrics and /health over HTTP while inside; yields the address, empty where no
    port is set.

    A listener of our own: a web framework would cost every worker 20 MB and 0.2 s for two answers.
    Raises: ConfigError where the port cannot be had.
    """
    if not watched.metrics_port:
        yield ""
        return

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(
            OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError
        ):
            async with asyncio.timeout(SCRAPE_WITHIN_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_answer(head, registries))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(
            on_connection, watched.metrics_host, watched.metrics_port, limit=SCRAPE_LIMIT_BYTES
        )
    except OSError as error:
        raise ConfigError(
            f"cannot tell metrics on {watched.metrics_host}:{watched.metrics_port}: {error.strerror}"
        ) from error
    try:
        host, port = server.sockets[0].getsockname()[:2]
        address = f"http://{host}:{port}/metrics"
        logs.logger().info("metrics.ready", address=address)
        yield address
    finally:
        server.close()


def _answer(head: bytes, registries: list[Registry]) -> bytes:
    """The whole response to a request with this head."""
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    status, kind, body = "404 Not Found", "text/plain", "there are /metrics and /health\n"
    if method != b"GET":
        status, body = "405 Method Not Allowed", "only GET\n"
    elif path == b"/metrics":
        status, kind, body = (
            "200 OK",
            "text/plain; version=0.0.4",
            "".join(registry.render_prometheus() for registry in registries),
        )
    elif path == b"/health":
        status, kind, body = "200 OK", "application/json", '{"status":"ok"}'
    data = body.encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
        + data
    )


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
