"""Tests of the batch runner: it goes on beside a damaged record or a damaged chunk of a file."""

import asyncio
from uuid import uuid4

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.batches import runner as batch_runner
from services.gateway.batches.asking import BatchAsker, LineAnswer, LineRequest
from services.gateway.batches.file_store import MONTH_S, FileStore
from services.gateway.batches.record import BatchRecord
from services.gateway.batches.results import id_of
from services.gateway.batches.runner import BatchRunner
from services.gateway.batches.store import BatchStore
from services.gateway.config import GatewayConfig
from shared.bus.nats import NatsBus, connect
from shared.clock import Clock
from shared.rules.rules import Rules
from tests.services.gateway.site import WITHIN_S

LINES = [
    msgspec.json.encode(
        {"custom_id": c, "method": "POST", "url": "/v1/completions", "body": {"prompt": "one"}}
    )
    for c in "abc"
]


class Asker(BatchAsker):
    """Answers each line at once, and keeps the ids of the requests that it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, line: LineRequest) -> LineAnswer | None:
        self.asked.append(line.request_id)
        return LineAnswer(200, line.request_id, b"{}")


async def stored_batch(bus: NatsBus) -> BatchRecord:
    """Store a batch of LINES, and its file."""
    files, name = FileStore(bus.files), uuid4().hex
    incoming = files.incoming()
    await incoming.take(b"\n".join(LINES), 60.0)
    await incoming.finish(60.0)
    await files.commit(
        "acme", incoming.id, incoming.digest, filename="a", purpose="batch", keep_s=60
    )
    now = int(Clock().unix_s())
    record = BatchRecord(
        id=f"batch_{name}",
        tenant="acme",
        endpoint="/v1/completions",
        input_file_id=incoming.id,
        completion_window="24h",
        created_at=now,
        expires_at=now + 86_400,
        output_keep_s=MONTH_S,
    )
    assert await BatchStore(bus.batches).create(record)
    return record


@pytest.mark.parametrize("what", ["record", "chunk"])
async def test_batches_run_beside_what_nobody_can_have_written(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(batch_runner, "TIDY_S", 0.0)
    async with connect(nats_url, "gateway") as bus:
        store, files, asker = BatchStore(bus.batches), FileStore(bus.files), Asker()
        orphan = f"file-{uuid4().hex}"
        await bus.files.append(orphan, b"x", 0)
        record = await stored_batch(bus)
        if what == "record":
            bad = replace(record, id="batch_a b", status="completed", created_at=1)
            await bus.batches.create("o.acme.bad", msgspec.json.encode(bad))
        else:
            await bus._client.jetstream().publish("$O.files.C.a+b", b"x")
        runner = BatchRunner(GatewayConfig(), bus, store, files, asker, Clock(), Rules())
        running = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(WITHIN_S):
                while (await _status(store, record)) != "completed":
                    assert not running.done()
                    await asyncio.sleep(0.05)
                while orphan in await bus.files.stored_chunks():
                    assert not running.done()
                    await asyncio.sleep(0.05)
        finally:
            running.cancel()
            await asyncio.wait([running])
        assert {id_of(record.id, n) for n in (1, 2, 3)} <= set(asker.asked)


async def _status(store: BatchStore, record: BatchRecord) -> str:
    found = await store.get(record.tenant, record.id)
    assert found is not None
    return found.status
