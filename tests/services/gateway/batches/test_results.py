"""Tests of storing a batch's results on a real nats-server: as files, by one writer at a time."""

import asyncio
from uuid import uuid4

import msgspec
import pytest

from loadgen.fleet.nats_server import NatsServer
from services.gateway.batches.file_store import MONTH_S, FileStore
from services.gateway.batches.results import ID, Result, ResultError, ResultFile, Superseded
from shared.bus.nats import connect
from shared.errors import PeerError, StoreFull
from shared.subjects import FILES_BUCKET
from tests.shared.store.bucket_sizes import resize


def result(number: int, text: str = "") -> Result:
    error = ResultError(code="none", message=text)
    return Result(id=f"{ID}x-{number}", custom_id=f"c{number}", response=None, error=error)


async def test_who_takes_over_knows_what_is_done_and_ends_the_writer_before(nats_url: str) -> None:
    chunks = f"file-{uuid4().hex}-output"
    async with connect(nats_url, "first") as bus, connect(nats_url, "second") as other:
        first, second = (ResultFile(b.files, chunks, 60.0) for b in (bus, other))
        await first.take_over()
        await first.add(result(1))
        await first.add(result(3))
        await second.take_over()
        assert second.done == {1, 3}
        with pytest.raises(Superseded):
            await first.add(result(4))
        await second.add(result(2))
        assert second.done == {1, 2, 3}


async def test_a_file_of_results_is_an_object_that_any_client_reads(nats_url: str) -> None:
    file_id = f"file-{uuid4().hex}-output"
    async with connect(nats_url, "writer") as bus:
        results, store = ResultFile(bus.files, file_id, 60.0), FileStore(bus.files)
        await results.take_over()
        for number in range(5):
            await results.add(result(number))
        made = await store.commit(
            "acme",
            file_id,
            results.digest,
            filename="a.jsonl",
            purpose="batch_output",
            keep_s=MONTH_S,
        )
        theirs = await bus._client.jetstream().object_store(FILES_BUCKET)
        got = await theirs.get(f"acme.{file_id}")
        assert got.data is not None
        assert [msgspec.json.decode(one)["custom_id"] for one in got.data.splitlines()] == [
            f"c{number}" for number in range(5)
        ]
        assert len(got.data) == made.bytes
        info = await store.find("acme", file_id)
        assert b"".join([part async for part in store.content(info)]) == got.data
        with pytest.raises(PeerError):
            await store.find("other", file_id)
        await bus.files.delete(info)
        assert await bus.files.last(file_id) is None
        with pytest.raises(PeerError):
            await store.find("acme", file_id)


async def test_an_answer_that_no_message_carries_is_an_error(nats_url: str) -> None:
    async with connect(nats_url, "writer") as bus:
        results = ResultFile(bus.files, f"file-{uuid4().hex}-output", 60.0)
        await results.take_over()
        await results.add(result(7, "x" * 9_000_000))
        last = await bus.files.last(results.chunks)
        assert last is not None
        assert msgspec.json.decode(last.payload)["error"]["code"] == "answer_too_large"
        assert results.done == {7}


async def test_a_result_that_finds_no_room_waits_for_it(nats_server: NatsServer) -> None:
    async with connect(nats_server.url, "writer") as bus:
        results = ResultFile(bus.files, "file-1-output", 60.0)
        await results.take_over()
        await resize(bus._client, "OBJ_files", None)
        adding = asyncio.create_task(results.add(result(1)))
        with pytest.raises(StoreFull):
            await bus.files.append("file-2", b"x", 0)
        assert not adding.done()
        await resize(bus._client, "OBJ_files", 1_000_000)
        await adding
        assert results.done == {1}
