"""Starts three nats-servers as one cluster. Everything between them, and between them and the
services, goes over proxies (tests/chaos/lines.py), so that a broker can be cut off.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from loadgen.fleet.child import Child
from loadgen.fleet.nats_server import MAX_PAYLOAD_BYTES, find_binary, greets, server_config
from loadgen.fleet.ports import HOST, free_port
from shared.bus.nats import connect
from shared.errors import BusError, ConfigError
from tests.chaos.lines import Lines

COPIES = 3  # of every stream
FORM_S = 60.0


@contextlib.asynccontextmanager
async def three_brokers(
    folder: Path, lines: Lines, replicas: Sequence[str]
) -> AsyncIterator[tuple[str, list[Child]]]:
    """A cluster with the streams of a fleet of these replicas: its address, and its processes."""
    ports = [free_port() for _ in range(COPIES)]
    routes = [free_port() for _ in range(COPIES)]
    known = [await lines.add(port) for port in routes]
    brokers, urls = [], []
    for n, (port, route) in enumerate(zip(ports, routes, strict=True), start=1):
        store = folder / f"broker-{n}"
        store.mkdir(parents=True)
        others = ", ".join(f'"nats://{HOST}:{p}"' for i, p in enumerate(known, 1) if i != n)
        cluster = [
            "name: chaos",
            "no_advertise: true",
            f'listen: "{HOST}:{route}"',
            f'advertise: "{HOST}:{known[n - 1]}"',
            f"routes: [{others}]",
        ]
        lines_of_config = [
            f"server_name: broker-{n}",
            *server_config(HOST, port, MAX_PAYLOAD_BYTES, store / "jetstream"),
            f"cluster: {{ {', '.join(cluster)} }}",
        ]
        config = store / "nats-server.conf"
        config.write_text("\n".join(lines_of_config) + "\n")
        command = [str(find_binary()), "--config", str(config)]
        broker = Child(f"broker-{n}", command, os.environ, store / "log", lambda _: None)
        broker.patient = True
        brokers.append(broker)
        urls.append(f"nats://{HOST}:{await lines.add(port)}")
    keepers = [asyncio.create_task(broker.keep()) for broker in brokers]
    try:
        async with asyncio.timeout(FORM_S):
            for port in ports:
                while not await asyncio.to_thread(greets, f"nats://{HOST}:{port}"):
                    await asyncio.sleep(0.05)
            await _make_streams(",".join(urls), replicas)
        yield ",".join(urls), brokers
    finally:
        for broker in brokers:
            broker.abandon()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


async def _make_streams(url: str, replicas: Sequence[str]) -> None:
    """Make them with a copy at each broker, as soon as the cluster has a leader."""
    while True:
        try:
            async with connect(url, "operator") as bus:
                await bus.make_streams(replicas, COPIES)
                return
        except (BusError, ConfigError):
            await asyncio.sleep(0.2)
