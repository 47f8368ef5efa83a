"""Tests of the bus at NATS servers and streams that are unfit for it: the error says what to do."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig

from loadgen.fleet.nats_server import NatsServer
from shared.bus.api import LEASE_TTL_S
from shared.bus.nats import NatsBus, connect
from shared.bus.users import Role, User
from shared.errors import BusError, BusTimeout, ConfigError
from tests.shared.store.bucket_sizes import resize

ADMISSION = User(Role.ADMISSION)
WITHIN_S = 60.0  # the longest that a busy machine may take for anything


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_payload_bytes": 1024 * 1024}, r"max_payload: 8MB.*nats-server.conf"),
        ({}, r"jetstream: \{.*nats-server.conf"),
    ],
)
async def test_a_limited_server_is_refused_with_what_to_write_where(
    tmp_path: Path, options: dict[str, int], told: str
) -> None:
    server = NatsServer(jetstream=False, **options)
    url = server.start(tmp_path / "nats")
    try:
        with pytest.raises(ConfigError, match=told):
            await let_in(url)
    finally:
        server.stop()


async def test_a_stream_that_is_not_there_is_named_and_not_made(nats_server: NatsServer) -> None:
    """Only the operator makes streams."""
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"acks-r7 is not there.*slackline streams"):
            await let_in(nats_server.url, User(Role.WORKER, "r7"))
    async with connect(nats_server.url, "service", User(Role.WORKER, "r0")) as bus:
        assert await bus.acks.last("slo.v1.acks.r0") is None


@contextlib.asynccontextmanager
async def pretended(version: str, error: str = "") -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server of this version that answers pings, and the first question of the streams with this
    error; the event that it has.
    """
    threw_out = asyncio.Event()
    info = {"server_id": "x", "version": version, "max_payload": 8388608, "headers": True}

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"INFO {json.dumps(info | {'proto': 1})}\r\n".encode())
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            elif error and line.startswith(b"PUB $JS.API.STREAM.INFO"):
                writer.write(f"-ERR '{error}'\r\n".encode())
                threw_out.set()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"nats://{host}:{port}", threw_out
    server.close()


async def test_a_too_old_server_is_refused_with_the_version_to_install() -> None:
    async with pretended("2.9.10") as (url, _):
        with pytest.raises(ConfigError, match=r"2\.9\.10.*install 2\.11"):
            await let_in(url)


async def test_a_stream_made_by_something_else_is_refused(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(
        StreamConfig(name="acks-r7", subjects=["slo.v1.acks.r7"], storage="memory")
    )
    await client.close()
    made_otherwise = "stream acks-r7 was made by something else: storage"
    with pytest.raises(ConfigError, match=made_otherwise):
        await let_in(nats_server.url, User(Role.WORKER, "r7"))
    async with connect(nats_server.url, "operator") as bus:
        with pytest.raises(ConfigError, match=made_otherwise):
            await bus.make_streams(["r7"])


async def test_a_stream_without_a_size_is_refused_with_the_command_that_gives_one(
    nats_server: NatsServer,
) -> None:
    async with connect(nats_server.url, "operator") as bus:
        await resize(bus._client, "KV_bodies", -1)
    with pytest.raises(ConfigError, match="nats stream edit KV_bodies --max-bytes=2147483648"):
        await let_in(nats_server.url, User(Role.ADMISSION))


async def test_no_server_at_all_is_said_in_time_and_without_the_password() -> None:
    with pytest.raises(ConfigError, match="no NATS server let us in") as caught:
        async with connect("nats://user:hunter2@127.0.0.1:1", "service", connect_s=0.3):
            pass
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "garbage",
        "127.0.0.1:4222",
        "http://127.0.0.1:8080",
        "nats://",
        "nats://me:hunter2@127.0.0.1:notaport",
        "nats://127.0.0.1:99999",
        "nats://127.0.0.1:4222,garbage",
    ],
)
async def test_an_address_that_is_none_is_said_at_once(url: str) -> None:
    given = url.rpartition(",")[2].rpartition("@")[2]
    with pytest.raises(ConfigError) as caught:
        async with connect(url, "service"):
            pass
    assert str(caught.value) == (
        f"the URL of a NATS server is nats://HOST:PORT (or tls://, ws://, wss://), not `{given}`"
    )


async def test_a_server_that_throws_us_out_for_good_ends_whoever_waits_for_the_bus() -> None:
    async with pretended("2.11.0", "Unknown Protocol Operation") as (url, thrown_out):
        bus = NatsBus(Client(), ADMISSION, 0.2)
        with pytest.raises(ConfigError):
            await bus.open(url, "service", WITHIN_S)
        async with asyncio.timeout(WITHIN_S):
            await thrown_out.wait()
            with pytest.raises(BusError, match="unknown protocol"):
                await bus.failed
        await bus.close(0.1)


async def let_in(url: str, user: User = ADMISSION) -> None:
    """Connect and leave again."""
    async with connect(url, "service", user):
        pass


@pytest.mark.parametrize("broken", [b"", b"{}", None], ids=["empty", "other", "gone"])
async def test_a_stream_with_a_broken_meta_inf_is_told_and_made_again_with_what_it_had(
    nats_server: NatsServer, tmp_path: Path, broken: bytes | None
) -> None:
    async with connect(nats_server.url, "operator") as bus:
        revision = await bus.requests.create("s.kept", b"record")
    nats_server.stop()
    (meta,) = (tmp_path / "nats").rglob("KV_requests/meta.inf")
    if broken is None:
        meta.unlink()
    else:
        meta.write_bytes(broken)
    nats_server.start(tmp_path / "nats")
    with pytest.raises(ConfigError, match=r"KV_requests is not there.* its meta\.inf"):
        await let_in(nats_server.url)
    async with connect(nats_server.url, "operator") as bus:
        with pytest.raises(BusTimeout, match=r"KV_requests does not answer.* it is not there"):
            await bus.requests.get("s.kept")
        (told,) = await bus.make_streams(["r0"])
        assert "meta.inf of the stream KV_requests" in told and "1 messages" in told
        entry = await bus.requests.get("s.kept")
        assert entry is not None and (entry.value, entry.revision) == (b"record", revision)
        assert await bus.make_streams(["r0"]) == []


async def test_a_stream_of_an_earlier_release_gets_the_settings_of_this_one_and_keeps_the_rest(
    nats_server: NatsServer,
) -> None:
    async with connect(nats_server.url, "operator") as bus:
        await bus.requests.create("s.kept", b"record")
        stream = bus._client.jetstream()
        for name, values in (
            ("KV_leases", {"max_age": 60.0}),
            ("KV_requests", {"allow_direct": False, "max_bytes": 777_000_000}),
        ):
            present = (await stream.stream_info(name)).config
            await stream.update_stream(dataclasses.replace(present, **values))
        with pytest.raises(ConfigError, match="KV_requests was made by something else"):
            await let_in(nats_server.url)
        told = await bus.make_streams(["r0"])
        assert told == [
            "the stream KV_requests has now allow_direct True (before: False)",
            f"the stream KV_leases has now max_age {LEASE_TTL_S} (before: 60.0)",
        ]
        assert (await stream.stream_info("KV_requests")).config.max_bytes == 777_000_000
        entry = await bus.requests.get("s.kept")
        assert entry is not None and entry.value == b"record"
        assert await bus.make_streams(["r0"]) == []
    await let_in(nats_server.url)
