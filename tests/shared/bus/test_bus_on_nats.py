"""Tests of the bus with a real NATS server, for what a simulated one cannot show: foreign bytes,
restarts and silence of the server, cancelled calls, leaving.
"""

import asyncio
import json
import os
import shutil
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
import pytest_asyncio
from msgspec import Struct
from nats.aio.client import Client

from loadgen.fleet.nats_server import NatsServer
from shared.bus import codec
from shared.bus.api import Call, Endpoint, Subscription
from shared.bus.nats import NatsBus, connect
from shared.bus.users import Role, User
from shared.errors import BusError, BusTimeout, NoResponders, PeerError
from shared.schemas import GenerateRequest, Refused

JSON = {"Content-Type": "application/json"}
WITHIN_S = 60.0  # the longest that a busy machine may take for anything
ADMISSION = User(Role.ADMISSION)


class Echo(Struct, frozen=True, kw_only=True):
    text: str
    number: int = 0


@pytest_asyncio.fixture
async def raw(nats_url: str) -> AsyncIterator[Client]:
    """A plain NATS client, without the code of our bus."""
    client = await nats.connect(nats_url, inbox_prefix="_ROLE.operator")
    yield client
    await client.close()


TASKS = set[asyncio.Task[None]]()


def echo(msg: Struct, call: Call) -> None:
    """Answer with what was asked."""
    task = asyncio.create_task(call.reply(msg))
    TASKS.add(task)
    task.add_done_callback(TASKS.discard)


async def serve_echo(
    bus: NatsBus, subject: str, name: str = "echo", queue: str = "", kind: Any = Echo
) -> Subscription:
    return await bus.serve(name, [Endpoint("echo", subject, kind, echo, queue=queue)], {})


async def test_an_answer_goes_to_an_inbox_of_its_asker_and_nowhere_else(
    nats_url: str, raw: Client
) -> None:
    """The asker names its subject: with that of a record, we would overwrite the record."""
    subject = f"t.{uuid.uuid4().hex}"
    key = f"s.victim.{uuid.uuid4().hex}"
    async with connect(nats_url, "service") as bus:
        await serve_echo(bus, subject, f"echo-{key[-8:]}")
        revision = await bus.requests.create(key, b"record")
        payload = msgspec.msgpack.encode(Echo(text="forged"))
        refused = bus.counters.bad_payloads
        for asked in (subject, "$SRV.PING", f"$SRV.INFO.echo-{key[-8:]}"):
            await raw.publish(asked, payload, reply=f"$KV.requests.{key}")
            await raw.publish(asked, payload, reply="_INBOX.victim.1")  # a tenant may not ask this
        # what came after has been answered, so what came before would have been
        assert (await raw.request(subject, payload, timeout=WITHIN_S)).data == payload
        assert (await raw.request(f"$SRV.PING.echo-{key[-8:]}", b"", timeout=WITHIN_S)).data
        entry = await bus.requests.get(key)
        assert entry is not None and (entry.value, entry.revision) == (b"record", revision)
        assert bus.counters.bad_payloads == refused + 6


async def test_whoever_was_asked_once_cannot_answer_the_next_question(
    nats_url: str, raw: Client
) -> None:
    """A worker may answer admission: knowing the next inbox, it could answer as the store."""
    seen = list[str]()

    async def answer_this_and_the_next(msg: Any) -> None:
        seen.append(msg.reply)
        prefix, _, token = msg.reply.rpartition(".")
        for ahead in range(100):
            forged = f"{prefix}.{int(token, 16) + ahead:0{len(token)}x}"
            await raw.publish(forged, codec.encode(Echo(text="forged"), json=False))

    asked, silent = f"t.{uuid.uuid4().hex}", f"t.{uuid.uuid4().hex}"
    await raw.subscribe(asked, cb=answer_this_and_the_next)
    await raw.subscribe(silent)
    await raw.flush()
    async with connect(nats_url, "service", ADMISSION) as bus:
        for _ in range(3):
            waiting = asyncio.create_task(bus.request(silent, Echo(text="?"), Echo, timeout_s=0.5))
            answer = await bus.request(asked, Echo(text="?"), Echo, timeout_s=WITHIN_S)
            assert answer.text == "forged", "to its own question"
            later = asyncio.create_task(bus.request(silent, Echo(text="?"), Echo, timeout_s=0.5))
            await bus.request(asked, Echo(text="?"), Echo, timeout_s=WITHIN_S)
            for question in (waiting, later):
                with pytest.raises(BusTimeout):
                    await question
    assert len(set(seen)) == 6


async def test_garbage_is_refused_counted_and_seen_by_no_handler(
    nats_url: str, raw: Client
) -> None:
    subject, seen = f"t.{uuid.uuid4().hex}", list[Any]()
    garbage = [
        b"",
        b"\x00",
        b"\xc1" * 2_000_000,
        b"\x91" * 2_000_000,
        b"\xdd\xff\xff\xff\xff",
        b'{"request_id": 1}',
        b"[" * 2_000_000,
        b"\xff\xfe",
    ]
    async with connect(nats_url, "service") as bus:
        endpoint = Endpoint("gen", subject, GenerateRequest, lambda msg, call: seen.append(msg))
        await bus.serve("tests", [endpoint], {})
        for headers in (None, JSON):
            for payload in garbage:
                answer = await raw.request(subject, payload, headers=headers, timeout=WITHIN_S)
                refused = codec.decode(Refused, answer.data, json=headers is JSON)
                assert refused.code == "invalid_request_error"
                assert refused.message
                assert answer.headers["Nats-Service-Error-Code"] == "400"
                assert answer.headers["Nats-Service-Error"] == refused.message
        await raw.publish(subject, b"\xc1")
        await raw.flush()
        told = await raw.request("$SRV.STATS.tests", b"", timeout=WITHIN_S)
        [stats] = json.loads(told.data)["endpoints"]
        assert bus.counters.bad_payloads == 2 * len(garbage) + 1
        assert (stats["num_requests"], stats["num_errors"]) == (2 * len(garbage) + 1,) * 2
        assert seen == []


@pytest.mark.parametrize("crash", [False, True])
async def test_after_a_restart_of_the_server_the_bus_is_back_with_all_it_had(
    nats_server: NatsServer, tmp_path: Path, crash: bool
) -> None:
    async with (
        connect(nats_server.url, "one", store_timeout_s=WITHIN_S) as one,
        connect(nats_server.url, "two", store_timeout_s=WITHIN_S) as two,
        connect(nats_server.url, "hasty", store_timeout_s=2.0) as hasty,
    ):
        await one.subscribe("t.echo", Echo, echo)
        revision = await one.requests.create("s.a", b"kept")
        seq = await one.acks.append("slo.v1.acks.r0", b"entry", 0)
        port = int(nats_server.url.rpartition(":")[2])
        if crash:
            nats_server.kill()
        else:
            nats_server.stop()
        with pytest.raises(BusTimeout):
            await hasty.requests.get("s.a")
        nats_server.start(tmp_path / "nats", port)
        async with asyncio.timeout(WITHIN_S):
            while not (one.counters.reconnects and two.counters.reconnects):
                await asyncio.sleep(0.01)
        entry = await two.requests.get("s.a")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"kept", revision)
        assert list(await two.acks.read("slo.v1.acks.r0")) == [(seq, b"entry")]
        assert await two.requests.update("s.a", b"new", revision) > revision
        back = Echo(text="back")
        assert await two.request("t.echo", back, Echo, timeout_s=WITHIN_S) == back
        assert one.counters.disconnects == two.counters.disconnects == 1
        assert not one.failed.done()


async def test_what_expired_or_was_deleted_does_not_come_back_with_a_killed_server(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    port = int(nats_server.url.rpartition(":")[2])
    async with connect(nats_server.url, "before") as bus:
        for name, bucket in (("requests", bus.requests), ("bodies", bus.bodies)):
            for key, ttl_s in ((f"{name}.lives", 300.0), (f"{name}.expires", 1.0)):
                revision = await bucket.create(key, b"open", ttl_s=300.0)
                for value in (b"placed", b"moved"):
                    revision = await bucket.update(key, value, revision)
                await bucket.update(key, b"ended", revision, ttl_s=ttl_s)
            for updates in range(3):
                key = f"{name}.deleted-{updates}"
                revision = await bucket.create(key, b"open", ttl_s=300.0)
                for _ in range(updates):
                    revision = await bucket.update(key, b"moved", revision)
                await bucket.delete(key)
            async with asyncio.timeout(WITHIN_S):
                while await bucket.get(f"{name}.expires") is not None:
                    await asyncio.sleep(0.1)
    nats_server.kill()
    nats_server.start(tmp_path / "nats", port)
    async with connect(nats_server.url, "after") as bus:
        for name, bucket in (("requests", bus.requests), ("bodies", bus.bodies)):
            there = {key: entry.value for key, entry in await bucket.scan(f"{name}.")}
            assert there == {f"{name}.lives": b"ended"}


async def test_a_handler_that_raises_ends_whoever_waits_for_the_bus_and_cannot_be_missed(
    nats_url: str,
) -> None:
    def broken(msg: Echo, call: Call) -> None:
        raise ZeroDivisionError("a bug of ours")

    async def service() -> None:
        async with connect(nats_url, "service") as bus:
            await bus.subscribe(subject, Echo, broken)
            await bus.publish(subject, Echo(text=""))
            async with asyncio.timeout(WITHIN_S):
                await asyncio.wait({bus.failed})

    subject = f"t.{uuid.uuid4().hex}"
    with pytest.raises(ZeroDivisionError):
        await service()


async def test_a_connection_that_went_silent_with_bytes_under_way_is_replaced(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packets are lost, and nobody says so: a server that is gone, or a broken network. What
    the server takes for alive has no part of the messages.
    """
    subject = f"t.{uuid.uuid4().hex}"
    silent, lines = asyncio.Event(), list[asyncio.Task[None]]()

    async def line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*nats_url[7:].split(":"))
        breaks = not silent.is_set()  # connections that are made later work

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                if breaks and silent.is_set():
                    await asyncio.Event().wait()
                sink.write(data)

        for source, sink in ((reader, far_writer), (far_reader, writer)):
            lines.append(asyncio.create_task(pass_on(source, sink)))

    server = await asyncio.start_server(line, "127.0.0.1", 0)
    monkeypatch.setattr("shared.bus.nats.PING_S", 0.2)
    host, port = server.sockets[0].getsockname()
    async with (
        connect(f"nats://{host}:{port}", "service", drain_s=0.1) as bus,
        connect(nats_url, "asker") as asker,
    ):
        await serve_echo(bus, subject)
        silent.set()
        for _ in range(4):  # more than the buffers of the kernel hold
            await bus.publish("t.silent", Echo(text="x" * 4_000_000))
        async with asyncio.timeout(WITHIN_S):
            while not bus.counters.reconnects:
                await asyncio.sleep(0.05)
            for number in range(20):
                asked = Echo(text="x", number=number)
                assert await asker.request(subject, asked, Echo, timeout_s=2.0) == asked
    server.close()
    for each in lines:
        each.cancel()
    await asyncio.gather(*lines, return_exceptions=True)


async def test_what_ended_while_the_server_was_silent_does_not_come_back_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner left its seat, and went on taking half of the offers for it."""
    monkeypatch.setattr("shared.bus.subscriptions.STOP_S", 0.2)
    server, subject = NatsServer(), f"t.{uuid.uuid4().hex}"
    url = server.start(tmp_path / "nats")
    endpoints = [
        Endpoint(name, f"{subject}.{name}", Echo, lambda msg, call: None, "seat") for name in "ab"
    ]
    try:
        async with asyncio.timeout(WITHIN_S), connect(url, "service", drain_s=0.1) as bus:
            served = await bus.serve("seat", endpoints, {})
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
            await served.stop()
            server.kill()
            server.start(tmp_path / "nats", port=int(url.rpartition(":")[2]))
            while not bus.counters.reconnects:
                await asyncio.sleep(0.01)
            for endpoint in endpoints:
                with pytest.raises(NoResponders):
                    await bus.request(endpoint.subject, Echo(text=""), Echo, timeout_s=5.0)
    finally:
        server.stop()


async def test_a_connection_goes_on_after_what_waited_for_the_server_was_cancelled(
    nats_url: str,
) -> None:
    subject, heard = f"t.{uuid.uuid4().hex}", asyncio.Event()
    async with connect(nats_url, "service") as bus:
        await bus.subscribe(subject, Echo, lambda msg, call: heard.set())
        for turns in range(20):
            flush = asyncio.create_task(bus.flush(1.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            flush.cancel()
            await asyncio.gather(flush, return_exceptions=True)
        await bus.publish(subject, Echo(text="still there"))
        async with asyncio.timeout(WITHIN_S):
            await heard.wait()


async def test_a_flush_that_is_cancelled_as_its_pong_comes_ends(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on, and with it a task that was cancelled while it subscribed: its gateway hung."""
    async with connect(nats_url, "service") as bus:
        flush = asyncio.create_task(bus.flush(WITHIN_S))
        pong = bus._client._process_pong

        async def pong_then_cancel() -> None:
            await pong()
            flush.cancel()

        monkeypatch.setattr(bus._client, "_process_pong", pong_then_cancel)
        await asyncio.wait((flush,))
        assert flush.cancelled()


async def test_leaving_and_cancelling_never_hang_though_the_server_is_gone(
    nats_server: NatsServer,
) -> None:
    async def service() -> None:
        async with connect(nats_server.url, "service", drain_s=0.5) as bus:
            await bus.subscribe("t.echo", Echo, lambda msg, call: None)
            ready.set()
            while True:
                await bus.publish("t.echo", Echo(text="x" * 1000))
                await asyncio.sleep(0.001)

    ready = asyncio.Event()
    task = asyncio.create_task(service())
    await ready.wait()
    nats_server.kill()
    await asyncio.sleep(0.2)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=WITHIN_S)
    assert done and task.cancelled()


async def test_a_payload_over_the_servers_limit_and_an_impossible_subject_raise(
    nats_url: str,
) -> None:
    async with connect(nats_url, "service") as bus:
        with pytest.raises(BusError, match="max_payload"):
            await bus.publish("t.big", Echo(text="x" * 9_000_000))
        for subject in ("t.a b", "t.a\r\nPUB t.b 0\r\n", ""):
            with pytest.raises(PeerError):
                await bus.publish(subject, Echo(text=""))
        for key in ("s.*", "s.>", "s..a", "", "s.a b"):
            with pytest.raises(PeerError):
                await bus.requests.create(key, b"")
        assert bus.counters.unsent == 0


async def test_a_copy_of_a_stopped_servers_folder_brings_every_bucket_back(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """The backup of docs/operate.md."""
    async with connect(nats_server.url, "gateway") as bus:
        await bus.batches.create("o.acme.b1", b"a batch")
        await bus.usage.create("2001-05.acme.01", b"a sum")
        await bus.files.append("f1", b"lines", 0)
    nats_server.stop()
    shutil.copytree(tmp_path / "nats" / "jetstream", tmp_path / "backup")
    shutil.copytree(tmp_path / "backup", tmp_path / "other" / "jetstream")
    restored = NatsServer()
    try:
        async with connect(restored.start(tmp_path / "other"), "gateway") as bus:
            batch, used = await bus.batches.get("o.acme.b1"), await bus.usage.get("2001-05.acme.01")
            assert (batch and batch.value, used and used.value) == (b"a batch", b"a sum")
            lines = await bus.files.last("f1")
            assert lines is not None and lines.payload == b"lines"
    finally:
        restored.stop()


async def test_messages_beyond_the_queue_of_a_subscription_are_counted(
    nats_url: str, raw: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.subscriptions.PENDING_MSGS", 10)
    subject, seen = f"t.{uuid.uuid4().hex}", list[int]()
    async with connect(nats_url, "service") as bus:
        await bus.subscribe(subject, Echo, lambda msg, call: seen.append(msg.number))
        for number in range(1000):
            await raw.publish(subject, codec.encode(Echo(text="", number=number), json=False))
        await raw.flush()
        await bus.flush(WITHIN_S)
        async with asyncio.timeout(WITHIN_S):
            while len(seen) + bus.counters.dropped < 1000:
                await asyncio.sleep(0.01)
        assert bus.counters.dropped > 0
