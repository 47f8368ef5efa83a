"""Serves a process's metrics over HTTP. A web framework would cost every worker 20 MB and 0.2 s."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.errors import ConfigError
from shared.process import logs
from shared.process.configuration import Watched, authority
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry

SCRAPE_WITHIN_S = 5.0  # for one request; scrapers send one every 5 s or less often
SCRAPE_LIMIT_BYTES = 16 * 1024  # of a request


@asynccontextmanager
async def scraped(watched: Watched, registries: list[Registry]) -> AsyncIterator[str]:
    """Serve the metrics within; yields the address, empty without a port. Raises ConfigError."""
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
            f"cannot serve metrics on {authority(watched.metrics_host, watched.metrics_port)}: "
            f"{error.strerror}"
        ) from error
    try:
        host, port = server.sockets[0].getsockname()[:2]
        address = f"http://{authority(host, port)}/metrics"
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
        kind, body = exposition(registries, _header(head, b"accept"))
        status = "200 OK"
    elif path == b"/health":
        status, kind, body = "200 OK", "application/json", '{"status":"ok"}'
    data = body.encode()
    head_lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(data)}",
        "Connection: close",
    )
    return "\r\n".join(head_lines).encode() + b"\r\n\r\n" + data


def _header(head: bytes, name: bytes) -> str:
    """The value of a header; empty where there is none."""
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().decode("latin-1")
    return ""
