"""Tests of the batch API on a real fleet: each line runs once, even where processes are killed."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Batch

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.rules.http_keys import line_of, new_key
from tests.fleet.api.scripted import client_of
from tests.fleet.live import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    store = tmp_path_factory.mktemp("fleet")
    async with Fleet(FleetSpec(pace=0.2, drain_s=2.0, store=store)) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    # it asks again while the gateway is away
    async with client_of(fleet, max_retries=20) as client:
        yield client


def line(n: int, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"Number {n}?"}], "max_tokens": 8, **more}
    return {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}


async def begin(
    client: openai.AsyncOpenAI, lines: Sequence[Any], window: str = "24h", **more: Any
) -> Batch:
    """Upload these lines as a file, and create a batch of it."""
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    fields: dict[str, Any] = {"endpoint": "/v1/chat/completions", "metadata": {"run": "1"}, **more}
    return await client.batches.create(
        input_file_id=file.id,
        completion_window=window,  # type: ignore[arg-type]
        **fields,
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(WAIT_S):
        while batch.status not in ENDED:
            await asyncio.sleep(0.2)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(one) for one in content.text.splitlines()]


async def requests_of(fleet: Fleet, batch: Batch) -> list[str]:
    """The ids of the requests that ran for a batch; the store keeps them for five minutes."""
    digits = batch.id.removeprefix("batch_")
    async with fleet.connect("test") as bus:
        keys = [key for key, _ in await bus.requests.scan("s.default.")]
    return sorted(key.rpartition(".")[2] for key in keys if digits in key)


def names(found: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(one["custom_id"] for one in found)


async def test_a_batch_of_lines_gives_a_file_of_answers(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    lines = [line(n) for n in range(40)]
    lines[3]["body"]["n"] = 2
    lines[4]["body"]["service_tier"] = "priority"
    lines[7]["body"]["temperature"] = 9  # is refused
    lines[8]["body"]["stream"] = True
    lines[9]["body"] = "nothing"
    batch = await begin(client, [*lines[:5], "", *lines[5:]])
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "1"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = await ended(client, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (40, 37, 3)
    good = await results(client, batch.output_file_id)
    bad = await results(client, batch.error_file_id)
    assert names([*good, *bad]) == names(lines)
    assert names(bad) == ["c7", "c8", "c9"]
    for one in good:
        body = one["response"]["body"]
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        assert body["object"] == "chat.completion"
        assert body["service_tier"] == "batch"
        assert len(body["choices"]) == (2 if one["custom_id"] == "c3" else 1)
    for one in bad:
        assert one["response"]["status_code"] == 400
        assert one["response"]["body"]["error"]["message"]
    info = await client.files.retrieve(batch.output_file_id or "")
    assert (info.purpose, info.status) == ("batch_output", "processed")
    assert info.bytes == len((await client.files.content(info.id)).content)
    ids = {one["id"] for one in [*good, *bad]}
    assert len(ids) == 40


@pytest.mark.slow
async def test_killed_processes_neither_lose_nor_double_a_line(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    lines = [line(n, max_tokens=40 + n % 60, ignore_eos=True) for n in range(400)]
    batch = await begin(client, lines)
    victims = ["gateway", "admission-1", "worker-r1", "gateway", "planner-1", "gateway"]
    known = {child.name for child in fleet.processes}
    seen = 0
    for victim in victims:
        async with asyncio.timeout(WAIT_S):
            while True:  # some more lines have ended
                batch = await client.batches.retrieve(batch.id)
                counts = batch.request_counts
                assert counts is not None
                if counts.completed > seen or batch.status in ENDED:
                    break
                await asyncio.sleep(0.05)
        seen = counts.completed
        if batch.status in ENDED:
            break
        name = victim if victim in known else next(n for n in known if n.startswith(victim[:5]))
        fleet.process(name).kill()
    assert fleet.process("gateway").starts > 1
    batch = await ended(client, batch)
    good = await results(client, batch.output_file_id)
    bad = await results(client, batch.error_file_id)
    assert bad == []
    assert (batch.status, names(good)) == ("completed", names(lines))
    for one in good:
        asked = lines[int(one["custom_id"][1:])]["body"]["max_tokens"]
        assert one["response"]["body"]["usage"]["completion_tokens"] == asked
    digits = batch.id.removeprefix("batch_")
    assert await requests_of(fleet, batch) == sorted(f"{digits}-{n}" for n in range(1, 401))


async def test_a_batch_that_is_cancelled_keeps_what_has_ended(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    lines = [line(n, max_tokens=8 if n < 4 else 7000, ignore_eos=True) for n in range(300)]
    batch = await begin(client, lines)
    async with asyncio.timeout(WAIT_S):
        while batch.request_counts is None or batch.request_counts.completed < 4:
            await asyncio.sleep(0.2)
            batch = await client.batches.retrieve(batch.id)
    with pytest.raises(openai.ConflictError):  # its file is read
        await client.with_options(max_retries=0).files.delete(batch.input_file_id)
    batch = await client.batches.cancel(batch.id)
    assert batch.status == "cancelling"
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    good = await results(client, batch.output_file_id)
    bad = await results(client, batch.error_file_id)
    assert {"c0", "c1", "c2", "c3"} <= set(names(good))
    assert names([*good, *bad]) == names(lines)
    assert {one["error"]["code"] for one in bad} == {"batch_cancelled"}
    again = await client.batches.cancel(batch.id)
    assert again.status == "cancelled"
    await client.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(batch.input_file_id)


async def test_what_has_not_ended_within_the_window_expires(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    lines = [line(n, max_tokens=8 if n < 4 else 7900, ignore_eos=True) for n in range(20)]
    batch = await ended(client, await begin(client, lines, window="12s"))
    good = await results(client, batch.output_file_id)
    bad = await results(client, batch.error_file_id)
    assert batch.status == "expired"
    assert names([*good, *bad]) == names(lines)
    assert {one["error"]["code"] for one in bad} == {"batch_expired"}


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["not json"], "invalid_json_line", 1),
        ([line(1), {"custom_id": "x"}], "invalid_json_line", 2),
        ([line(1), {**line(2), "url": "/v1/completions"}], "mismatched_endpoint", 2),
        ([line(1), "", line(1)], "duplicate_custom_id", 3),
        ([{**line(1), "custom_id": ""}], "invalid_json_line", 1),
        ([""], "empty_file", None),
    ],
)
async def test_a_file_that_is_no_batch_fails_and_says_where(
    client: openai.AsyncOpenAI, lines: list[Any], code: str, number: int | None
) -> None:
    batch = await ended(client, await begin(client, lines))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(e.code, e.line) for e in batch.errors.data] == [(code, number)]


async def test_the_same_key_makes_one_batch(client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=b"x", purpose="batch")
    asked: dict[str, Any] = {
        "input_file_id": file.id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "extra_headers": {"Idempotency-Key": uuid4().hex},
    }
    first, second = await client.batches.create(**asked), await client.batches.create(**asked)
    assert first.id == second.id
    with pytest.raises(openai.ConflictError):
        await client.with_options(max_retries=0).batches.create(**{**asked, "metadata": {"a": "b"}})


async def test_lists_come_in_pages(client: openai.AsyncOpenAI) -> None:
    files = [await client.files.create(file=f"{n}".encode(), purpose="batch") for n in range(3)]
    listed = [file.id async for file in client.files.list(limit=2)]
    assert {file.id for file in files} <= set(listed)
    assert len(set(listed)) == len(listed)
    batches = [batch.id async for batch in client.batches.list(limit=2)]
    assert len(set(batches)) == len(batches) >= 2


@pytest.mark.parametrize(
    ("method", "path", "more", "status", "param"),
    [
        ("POST", "/v1/files", {"content": b"x"}, 400, "file"),
        ("POST", "/v1/files", {"data": {"purpose": "batch"}, "files": {"x": b"1"}}, 400, "x"),
        ("POST", "/v1/files", {"files": {"file": b"1"}}, 400, "purpose"),
        ("POST", "/v1/files", {"data": {"purpose": "vision"}, "files": {"file": b"1"}}, 400,
         "purpose"),
        ("GET", "/v1/files/file-none", {}, 404, "file_id"),
        ("GET", "/v1/files/file-none/content", {}, 404, "file_id"),
        ("GET", "/v1/files/%2e%2e", {}, 404, "file_id"),
        ("DELETE", "/v1/files/file-none", {}, 404, "file_id"),
        ("GET", "/v1/files?limit=0", {}, 400, "limit"),
        ("GET", "/v1/files?limit=%C2%B2", {}, 400, "limit"),
        ("GET", "/v1/files?after=x", {}, 400, "after"),
        ("GET", "/v1/files?surprise=1", {}, 400, "surprise"),
        ("GET", "/v1/batches?limit=101", {}, 400, "limit"),
        ("GET", "/v1/batches/none", {}, 404, "batch_id"),
        ("POST", "/v1/batches/none/cancel", {}, 404, "batch_id"),
        ("POST", "/v1/batches", {"json": {}}, 400, "input_file_id"),
        ("POST", "/v1/batches", {"json": {"input_file_id": "file-none", "completion_window": "24h",
         "endpoint": "/v1/completions"}}, 404, "file_id"),
        ("POST", "/v1/batches", {"json": {"input_file_id": "file-none", "completion_window": "soon",
         "endpoint": "/v1/completions"}}, 400, "completion_window"),
        ("POST", "/v1/batches", {"json": {"input_file_id": "file-none", "completion_window": "24h",
         "endpoint": "/v1/embeddings"}}, 400, "endpoint"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_its_name(
    fleet: Fleet, method: str, path: str, more: dict[str, Any], status: int, param: str
) -> None:
    async with httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S) as http:
        answer = await http.request(method, path, **more)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "regex" not in error["message"]


@pytest.mark.slow
async def test_no_tenant_reads_anothers_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("keys")
    keys = {tenant: new_key() for tenant in ("acme", "other")}
    file = folder / "keys"
    file.write_text("".join(line_of(tenant, key) for tenant, key in keys.items()))
    environment = {"SLACKLINE_GATEWAY_KEYS": str(file)}
    async with (
        Fleet(FleetSpec(drain_s=2.0, environment=environment)) as fleet,
        client_of(fleet, keys["acme"]) as acme,
        client_of(fleet, keys["other"]) as other,
    ):
        batch = await begin(acme, [line(1)])
        batch = await ended(acme, batch)
        assert batch.status == "completed"
        asks: list[Any] = [
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id or ""),
            other.files.delete(batch.input_file_id),
        ]
        for ask in asks:
            with pytest.raises(openai.NotFoundError):
                await ask
        assert [file.id async for file in other.files.list()] == []
        assert [one.id async for one in other.batches.list()] == []
        assert (await acme.files.retrieve(batch.input_file_id)).bytes > 0
