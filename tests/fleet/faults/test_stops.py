"""Tests of services that are told to stop when NATS has just gone: each ends within its grace."""

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.fleet.nats_server import NatsServer
from shared.client.client import Client
from shared.clock import Clock
from shared.process.stopping import GRACE_S
from tests.fleet.live import WAIT_S, request_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DRAIN_S = 2.0
SERVICES = ("gateway", "admission", "planner", "relegation", "worker-r1", "worker-r2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_every_service_ends_within_its_grace_whatever_nats_does(
    tmp_path: Path, number: signal.Signals
) -> None:
    """All are told at once, in the middle of answers, and with requests that wait in the pool."""
    server = NatsServer()
    spec = FleetSpec(url=server.start(tmp_path / "nats"), pace=1.0, drain_s=DRAIN_S)
    pid = server.pid
    assert pid is not None
    try:
        async with Fleet(spec) as fleet:
            async with fleet.connect("operator") as bus:
                await bus.make_streams(fleet.replicas)
            async with fleet.connect("test") as bus, Client(bus, Clock()) as client:
                handles = [await client.submit(request_for(4000), "chat") for _ in range(40)]
                async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as http:
                    body = {"prompt": "What?", "max_tokens": 4000, "stream": True}
                    async with http.stream(
                        "POST", f"{fleet.http_url}/v1/completions", json=body
                    ) as answer:
                        await anext(answer.aiter_lines())
                        os.kill(pid, number)
                        took_s = await stopped(fleet)
            assert len(handles) == 40
    finally:
        os.kill(pid, signal.SIGCONT)
        server.stop()
    assert max(took_s.values()) < DRAIN_S + GRACE_S, took_s


async def stopped(fleet: Fleet) -> dict[str, float]:
    """Stop all services at once; the seconds that each took."""

    async def stop(name: str) -> float:
        began_s = time.monotonic()
        await fleet.process(name).stop(60.0)
        return time.monotonic() - began_s

    took_s = await asyncio.gather(*(stop(name) for name in SERVICES))
    return dict(zip(SERVICES, took_s, strict=True))
