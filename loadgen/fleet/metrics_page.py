"""Serves the metrics of all processes of a fleet on one page, samples labelled with their process.

So a scraper needs one address, even where processes are started again.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.errors import ConfigError
from shared.telemetry.exposition import (
    OPEN_METRICS,
    OPEN_METRICS_END,
    PROMETHEUS,
    wants_open_metrics,
)

WITHIN_S = 2.0  # for the page of one process
LABEL = "process"


class Server(uvicorn.Server):
    """A server that leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error


@asynccontextmanager
async def metrics_page(listener: socket.socket, pages: Mapping[str, str]) -> AsyncIterator[str]:
    """Serves the page while the context lasts; yields its address. `pages`: address by process."""
    async with httpx.AsyncClient(timeout=WITHIN_S, trust_env=False, verify=False) as http:

        async def one(name: str, url: str, kind: str) -> tuple[str, str]:
            try:
                return name, (await http.get(url, headers={"accept": kind})).text
            except httpx.HTTPError:
                return name, ""  # it is being started again

        async def page(request: Request) -> Response:
            is_open = wants_open_metrics(request.headers.get("accept", ""))
            kind, end = (OPEN_METRICS, OPEN_METRICS_END) if is_open else (PROMETHEUS, "")
            texts = await asyncio.gather(*(one(name, url, kind) for name, url in pages.items()))
            return Response(merged(dict(texts)) + end, headers={"content-type": kind})

        app = Starlette(routes=[Route("/metrics", page)])
        server = Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="fleet.metrics")
        host, port = listener.getsockname()[:2]
        try:
            yield f"http://{host}:{port}/metrics"
        finally:
            server.should_exit = True
            await serving


def merged(texts: Mapping[str, str]) -> str:
    """One exposition from those of several processes: each family once, its samples labelled."""
    families: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for process, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line == OPEN_METRICS_END.strip():
                continue
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if not any(known.split(" ", 3)[1] == line.split(" ", 3)[1] for known in head):
                    head.append(line)
            elif line:
                families.setdefault(family, []).append(_labelled(line, process))
    lines = [line for family in families for line in (*heads.get(family, ()), *families[family])]
    return "\n".join(lines) + "\n" if lines else ""


def _labelled(sample: str, process: str) -> str:
    """A sample of this process: `name{labels} value`, or `name value`."""
    label = f'{LABEL}="{process}"'
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
