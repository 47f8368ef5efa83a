"""The container health check, against a real NATS server."""

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path

import nats
import nats.micro
import pytest

from loadgen.fleet.nats_server import NatsServer
from tests.self_signed import certificate_in

SCRIPT = Path(__file__).parents[2] / "infra" / "health.py"


def healthy(url: str, *arguments: str) -> bool:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={"SLACKLINE_URL": url},
        check=False,
        timeout=30,
        capture_output=True,
    )
    return done.returncode == 0


async def test_a_service_is_healthy_while_it_answers_under_its_name_and_metadata(
    tmp_path: Path,
) -> None:
    server = NatsServer()
    url = server.start(tmp_path)
    try:
        assert not healthy(url, "worker")
        client = await nats.connect(url)
        service = await nats.micro.add_service(
            client, name="worker", version="0.1.0", metadata={"replica": "r1"}
        )
        await client.flush()
        assert await passes(url, "worker")
        assert await passes(url, "worker", "replica=r1")
        assert not await passes(url, "worker", "replica=r2")
        assert not await passes(url, "planner")
        await service.stop()
        await client.close()
        assert not healthy(url, "worker")
    finally:
        server.stop()
    assert not healthy(url, "worker")


async def passes(url: str, *arguments: str) -> bool:
    """Check in a thread, since the service that answers lives on this loop."""
    return await asyncio.to_thread(healthy, url, *arguments)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/health"])
def test_an_address_without_a_listener_is_not_healthy(url: str) -> None:
    assert not healthy("", url)


async def test_an_address_with_a_certificate_of_another_name_is_healthy(tmp_path: Path) -> None:
    cert, key = certificate_in(tmp_path, "DNS:gateway.example")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        assert await passes("", f"https://127.0.0.1:{port}/health")
