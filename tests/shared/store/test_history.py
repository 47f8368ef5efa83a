"""Tests of the history of ended requests on a real server: found by each name, bounded, no text."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio
from msgspec.structs import replace

from loadgen.fleet.nats_server import NatsServer
from shared.bus.nats import NatsBus, connect
from shared.bus.users import Role, User
from shared.columns import pack
from shared.core.record.verdict import ended
from shared.schemas import Record, Resume
from shared.store import history
from shared.vocabulary import FinishReason
from tests import made
from tests.shared.store.bucket_sizes import asked, resize, state_of

WITHIN_S = 60.0
STREAM = "KV_history"
AT_UNIX_S = 6_000_000.0
TRACE = "ab" * 16


@pytest_asyncio.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    async with connect(nats_server.url, "test") as bus:
        yield bus


def finished(key: str, **more: object) -> Record:
    record = made.record(key, arrived_unix_s=AT_UNIX_S, body=b"a prompt", asked=b"asked")
    resume = Resume(tokens=pack([1, 2]), text="an answer")
    return ended(replace(record, **more), FinishReason.LENGTH, resume, AT_UNIX_S + 1.0)


async def keep(bus: NatsBus, *records: Record) -> None:
    """Publish the records as a service does, and wait until the server has stored them."""
    before = (await state_of(bus._client, STREAM))["last_seq"]
    for record in records:
        await bus.publish(history.subject_of(record), history.kept(record))
    async with asyncio.timeout(WITHIN_S):
        while (await state_of(bus._client, STREAM))["last_seq"] < before + len(records):
            await asyncio.sleep(0.01)


def keys(records: object) -> list[str]:
    return [record.key for record in records]  # type: ignore[attr-defined]


async def test_a_request_is_found_by_id_trace_and_minute_of_its_own_tenant(bus: NatsBus) -> None:
    traced = {"traceparent": f"00-{TRACE}-{'cd' * 8}-01"}
    await keep(
        bus,
        finished("acme.1", **traced),
        finished("other.1", **traced),
        finished("acme.2"),
        finished("acme.3", arrived_unix_s=AT_UNIX_S + 60.0),
        finished("acme.2", tier="again"),
    )
    assert keys(await history.of_trace(bus.history, "*", TRACE)) == ["acme.1", "other.1"]
    assert keys(await history.of_trace(bus.history, "other", TRACE)) == ["other.1"]
    assert keys(await history.of_minute(bus.history, "acme", AT_UNIX_S + 9.0)) == [
        "acme.1",
        "acme.2",
    ]
    newest = await history.newest(bus.history, finished("acme.2").key)
    assert newest is not None and newest.tier == "again"
    assert await history.newest(bus.history, finished("acme.4").key) is None


async def test_it_has_neither_prompt_nor_answer(bus: NatsBus) -> None:
    await keep(bus, finished("acme.1"))
    [(_, entry)] = await bus.history.scan("acme.")
    for text in (b"a prompt", b"an answer", b"asked"):
        assert text not in entry.value


async def test_a_full_history_forgets_the_oldest_and_takes_the_newest(bus: NatsBus) -> None:
    await keep(bus, *(finished(f"acme.{n}") for n in range(20)))
    await resize(bus._client, STREAM, None)
    await keep(bus, *(finished(f"acme.{n}") for n in range(20, 25)))
    left = keys(await history.of_minute(bus.history, "acme", AT_UNIX_S))
    assert left[-1] == "acme.24"
    assert "acme.0" not in left
    assert 18 <= len(left) <= 20


async def test_an_operator_may_keep_it_for_longer(nats_server: NatsServer) -> None:
    async with connect(nats_server.url, "operator") as operator:
        config = (await asked(operator._client, f"STREAM.INFO.{STREAM}"))["config"]
        assert config["max_age"] == 86_400 * 10**9
        config["max_age"] *= 7
        await asked(operator._client, f"STREAM.UPDATE.{STREAM}", config)
    async with connect(nats_server.url, "admission", User(Role.ADMISSION)) as bus:
        await keep(bus, finished("acme.1"))
        assert await history.newest(bus.history, finished("acme.1").key) is not None
