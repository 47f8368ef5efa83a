"""The container health check, against a real NATS server."""

import asyncio
import subprocess
import sys
from pathlib import Path

import nats
import nats.micro
import pytest

from loadgen.fleet.nats_server import NatsServer

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
