"""Tests of the store of records and bodies: what a lost race or a full bucket leaves behind."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
from msgspec.structs import replace

from loadgen.fleet.nats_server import NatsServer
from shared.bus.api import KeyValue
from shared.bus.nats import NatsBus, connect
from shared.columns import pack
from shared.core.record.record import cancelled, closed
from shared.errors import BusTimeout, StoreDamaged, StoreFull
from shared.schemas import Body, Record, Resume, Sampling
from shared.store.records import Records
from shared.vocabulary import RequestKey
from tests import made
from tests.shared.store.bucket_sizes import resize

BODY = Body(prompt=pack(range(10_000)), sampling=Sampling())
OUTPUT = Resume(tokens=pack(range(1_000)), text="abc")


@pytest_asyncio.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    async with connect(nats_server.url, "test") as bus:
        yield bus


def new(records: Records, name: str = "") -> Record:
    key = RequestKey(f"default.{name or uuid.uuid4().hex}")
    return made.record(
        key,
        body_key=records.body_key(key),
        expires_unix_s=100.0,
        prompt_tokens=10000,
        stream_subject="slo.v1.stream.x",
    )


async def cancelled_with_output(records: Records) -> Record:
    """A request that has tokens, and is to end."""
    record = replace(new(records), resume=OUTPUT)
    assert await records.create(record, BODY) is not None
    changed = await records.change(record.key, cancelled)
    assert changed is not None
    return changed.record


async def present(bus: NatsBus) -> set[str]:
    """The keys of bodies that have a value."""
    return {key for key, _ in await bus.bodies.scan("")}


async def test_copies_of_a_request_that_come_at_once_leave_one_body(bus: NatsBus) -> None:
    records = Records(bus.requests, bus.bodies)
    copies = [new(records, "burst") for _ in range(20)]
    made = await asyncio.gather(*(records.create(record, BODY) for record in copies))
    (winner,) = [stored for stored in made if stored is not None]
    assert await present(bus) == {winner.record.body_key}


async def test_an_end_that_is_written_by_several_at_once_leaves_one_output(bus: NatsBus) -> None:
    records = Records(bus.requests, bus.bodies)
    record = await cancelled_with_output(records)
    ends = await asyncio.gather(
        *(records.change(record.key, lambda record: closed(record, 1.0)) for _ in range(20))
    )
    (end,) = [each for each in ends if each is not None]
    outputs = {name for name, _ in await bus.requests.scan(f"o.{record.key}.")}
    assert outputs == {end.record.output_key}


class Unheard:
    """A bucket that loses its next answers to writes. `made`: whether each write happens."""

    def __init__(self, bucket: KeyValue, *made: bool) -> None:
        self._bucket, self._made = bucket, list(made)

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl_s: float | None = None
    ) -> int:
        made = self._made.pop(0) if self._made else None
        if made is False:
            raise BusTimeout("no answer")
        written = await self._bucket.update(key, value, revision, ttl_s=ttl_s)
        if made:
            raise BusTimeout("no answer")
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)


@pytest.mark.parametrize("made", [(True,), (False,), (False, False, True), (False, False, False)])
async def test_an_end_whose_write_is_not_answered_leaves_one_output(
    bus: NatsBus, made: tuple[bool, ...]
) -> None:
    record = await cancelled_with_output(Records(bus.requests, bus.bodies))
    records = Records(cast("KeyValue", Unheard(bus.requests, *made)), bus.bodies)
    ended = await records.change(record.key, lambda record: closed(record, 1.0))
    assert ended is not None
    outputs = {name for name, _ in await bus.requests.scan(f"o.{record.key}.")}
    assert outputs == {ended.record.output_key}


async def test_an_end_that_comes_too_late_after_an_unanswered_write_leaves_no_output_of_its_own(
    bus: NatsBus,
) -> None:
    record = await cancelled_with_output(Records(bus.requests, bus.bodies))
    records = Records(cast("KeyValue", Unheard(bus.requests, False)), bus.bodies)
    steps = iter((lambda record: closed(record, 1.0), lambda record: None))
    assert await records.change(record.key, lambda record: next(steps)(record)) is None
    assert not await bus.requests.scan(f"o.{record.key}.")


async def test_a_full_bucket_of_bodies_takes_no_request_and_lets_those_it_has_end(
    bus: NatsBus,
) -> None:
    records = Records(bus.requests, bus.bodies)
    first = await records.create(new(records), BODY)
    assert first is not None
    await resize(bus._client, "KV_bodies", None)
    refused = new(records)
    with pytest.raises(StoreFull):
        await records.create(refused, BODY)
    assert await records.get(refused.key) is None
    assert await present(bus) == {first.record.body_key}
    changed = await records.change(first.record.key, lambda record: replace(record, left="x"))
    assert changed is not None
    await records.forget_body(first.record.body_key)
    assert await present(bus) == set(), "a full bucket can be emptied"
    assert await records.create(refused, BODY) is not None


async def test_a_full_bucket_of_records_leaves_no_body(bus: NatsBus) -> None:
    records = Records(bus.requests, bus.bodies)
    assert await records.create(new(records), BODY) is not None
    before = await present(bus)
    await resize(bus._client, "KV_requests", None)
    refused = new(records)
    with pytest.raises(StoreFull):
        await records.create(refused, BODY)
    assert await present(bus) == before
    await resize(bus._client, "KV_requests", 1_000_000)
    assert await records.create(refused, BODY) is not None


async def test_an_output_or_a_body_that_is_not_whole_is_an_error_and_not_an_empty_one(
    bus: NatsBus,
) -> None:
    records = Records(bus.requests, bus.bodies)
    record = replace(new(records), resume=OUTPUT)
    assert await records.create(record, BODY) is not None
    await records.change(record.key, cancelled)
    ended = await records.change(record.key, lambda record: closed(record, 1.0))
    assert ended is not None
    assert await records.output(ended.record) == record.resume
    assert await records.body(record.body_key) == BODY
    for bucket, key in ((bus.requests, ended.record.output_key), (bus.bodies, record.body_key)):
        entry = await bucket.get(key)
        assert entry is not None
        await bucket.update(key, entry.value[:-1], entry.revision)
    with pytest.raises(StoreDamaged, match=f"{record.body_key} is damaged in the store"):
        await records.body(record.body_key)
    with pytest.raises(StoreDamaged, match=f"{ended.record.output_key} is damaged in the store"):
        await records.output(ended.record)
    await bus.requests.delete(ended.record.output_key)
    with pytest.raises(StoreDamaged, match=f"{ended.record.output_key} is missing"):
        await records.output(ended.record)


async def test_a_small_body_and_a_small_output_lie_in_the_record(bus: NatsBus) -> None:
    records = Records(bus.requests, bus.bodies)
    body = replace(BODY, prompt=pack([7, 8]))
    small = Resume(tokens=pack([1, 2, 3]), text="abc")
    record = records.with_small(replace(new(records), resume=small), body)
    assert await records.create(record, body) is not None
    stored = await Records(bus.requests, bus.bodies).get(record.key)
    assert stored is not None
    assert await records.body_of(stored.record) == body
    assert record.body_key not in await present(bus)
    damaged = replace(stored.record, body=stored.record.body[:-1])
    with pytest.raises(StoreDamaged, match=f"{record.body_key} is damaged in the store"):
        await records.body_of(damaged)
    await records.change(record.key, cancelled)
    ended = await records.change(record.key, lambda record: closed(record, 1.0))
    assert ended is not None
    assert await records.output(ended.record) == small
    assert await records.body_of(ended.record) is None, "the prompt goes when the request ends"
    assert not await bus.requests.scan(f"o.{record.key}.")
