"""Tests of the containers' health check (infra/health.py) against a real NATS server."""

import asyncio
import os
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.access import Access
from loadgen.fleet.key_folder import Keys
from loadgen.fleet.nats_server import NatsServer
from loadgen.fleet.ports import free_port
from loadgen.load.connection import bus_at
from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.bus.users import OPERATOR, Role, User
from shared.schemas import Holdings, HoldingsAnswer
from shared.vocabulary import ReplicaId
from tests.self_signed import certificate_in

SCRIPT = Path(__file__).parents[2] / "infra" / "health.py"
R1 = ReplicaId("r1")


def healthy(access: Access, *arguments: str) -> bool:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SLACKLINE_URL": access.url,
            "SLACKLINE_CREDS": access.creds,
            "SLACKLINE_TLS_CA": access.tls_ca,
        },
        check=False,
        timeout=30,
        capture_output=True,
    )
    return done.returncode == 0


@pytest.mark.parametrize("with_keys", [False, True])
async def test_a_service_is_healthy_while_it_answers(tmp_path: Path, with_keys: bool) -> None:
    keys = Keys(tmp_path / "keys")
    keys.add([User(Role.WORKER, "r1"), User(Role.WORKER, "r2")])
    server = NatsServer(include=keys.server_conf if with_keys else None)
    url = server.start(tmp_path / "nats")

    def access(user: User) -> Access:
        return (
            Access(url, str(keys.creds(user)), str(keys.tls_ca(user))) if with_keys else Access(url)
        )

    admission, planner = access(User(Role.ADMISSION)), access(User(Role.PLANNER))
    worker, other = access(User(Role.WORKER, "r1")), access(User(Role.WORKER, "r2"))
    answers = set[asyncio.Task[None]]()

    def on_holdings(asked: Holdings, call: Call) -> None:
        answers.add(asyncio.ensure_future(call.reply(HoldingsAnswer(incarnation="1", known=[]))))

    try:
        assert not healthy(planner, "planner")
        async with bus_at(access(OPERATOR), "service", OPERATOR) as bus:
            holdings = Endpoint("holdings", subjects.holdings(R1), Holdings, on_holdings)
            services = [
                await bus.serve("worker", [holdings], {}),
                await bus.serve("planner", [], {}),
            ]
            assert await passes(worker, "worker", "r1")
            assert not await passes(other, "worker", "r2")
            assert await passes(planner, "planner")
            gone = f"nats://127.0.0.1:{free_port()}"
            assert await passes(replace(planner, url=f"{gone},{url},{gone}"), "planner")
            assert not await passes(replace(planner, url=f"{gone},{gone}"), "planner")
            assert not await passes(admission, "requests")
            for service in services:
                await service.stop()
            assert not await passes(worker, "worker", "r1")
            assert not await passes(planner, "planner")
            if with_keys:
                assert not await passes(replace(planner, creds=""), "planner")
                assert not await passes(replace(planner, tls_ca=""), "planner")
    finally:
        server.stop()
    assert not healthy(planner, "planner")


async def passes(access: Access, *arguments: str) -> bool:
    """Check in a thread, since the service that answers lives on this loop."""
    return await asyncio.to_thread(healthy, access, *arguments)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/health"])
def test_an_address_without_a_listener_is_not_healthy(url: str) -> None:
    assert not healthy(Access(""), url)


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
        assert await passes(Access(""), f"https://127.0.0.1:{port}/health")
