"""A NATS server and chosen services as processes: the bench plays the rest of the fleet."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from loadgen.bench.machine import cpu_s
from loadgen.fleet.child import Child, Say
from loadgen.fleet.nats_server import NatsServer
from shared.bus.nats import NatsBus, connect
from shared.vocabulary import ReplicaId

# the line that each service logs once it works
READY = {"planner": '"planner.ready"', "admission": '"door.open"', "gateway": '"service.ready"'}
POLL_S = 0.02


class LoneServices:
    """Services of one NATS server, without keys."""

    def __init__(self, url: str, folder: Path, bus: NatsBus, say: Say) -> None:
        self.bus = bus  # of the operator
        self._url, self._folder, self._say = url, folder, say
        self._kept: list[tuple[Child, asyncio.Task[None]]] = []

    async def start(self, service: str, environment: Mapping[str, str] | None = None) -> None:
        """Start one more process of a service and wait until it works. Raises ChildError."""
        name = f"{service}-{len(self._kept) + 1}"
        child = Child(
            name,
            [sys.executable, "-m", f"services.{service}"],
            {**os.environ, "SLACKLINE_URL": self._url, **(environment or {})},
            self._folder / f"{name}.jsonl",
            self._say,
        )
        keeper = asyncio.create_task(child.keep(), name=f"bench.{name}")
        self._kept.append((child, keeper))
        while READY[service] not in child.output():
            if keeper.done():
                keeper.result()
            await asyncio.sleep(POLL_S)
        child.patient = True

    def cpu_s(self) -> float:
        """The CPU seconds that the services have used since they began, without the server's."""
        used = [cpu_s(child.pid) for child, _ in self._kept if child.pid is not None]
        return sum(seconds for seconds in used if seconds is not None)

    async def stop(self) -> None:
        """Kill them: what is under way at the end is of no interest."""
        for child, keeper in self._kept:
            child.abandon()
            keeper.cancel()
        await asyncio.gather(*(keeper for _, keeper in self._kept), return_exceptions=True)


@asynccontextmanager
async def lone_services(replicas: Iterable[ReplicaId], say: Say) -> AsyncIterator[LoneServices]:
    """A NATS server with the streams of these replicas, a connection to it, and no service yet."""
    server = NatsServer()
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as folder:
        url = server.start(Path(folder) / "nats")
        try:
            async with connect(url, "slackline-bench") as bus:
                await bus.make_streams(replicas)
                services = LoneServices(url, Path(folder), bus, say)
                try:
                    yield services
                finally:
                    await services.stop()
        finally:
            server.stop()
