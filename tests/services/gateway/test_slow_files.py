"""Tests of slow uploads and downloads at the gateway: they are bounded and disturb nobody else."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx
import pytest

from services.gateway.batches.file_store import CHUNK_BYTES
from services.gateway.http.guard import TENANT
from shared.bus import objects
from shared.bus.nats import NatsBus, connect
from shared.bus.objects import ObjectInfo, Objects
from shared.errors import BusTimeout
from tests.services.gateway.site import WITHIN_S, Site, site

HEAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
MB = 1_000_000
FILE = b"0123456789abcdef" * (2 * MB)  # 32 MB: more than sockets hold


@contextlib.asynccontextmanager
async def connection(
    at: Site, receive_bytes: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to the gateway, for what no HTTP client does."""
    address = urlsplit(at.url)
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def chunks_in(bus: NatsBus) -> set[str]:
    return set(await bus.files.stored_chunks())


def kept_for(port: int) -> bool:
    """Tells whether the kernel still has bytes to send to this port of a client."""
    with open("/proc/net/tcp") as lines:
        for line in list(lines)[1:]:
            _, _, remote, _, queues, *_ = line.split()
            if int(remote.partition(":")[2], 16) == port and int(queues.partition(":")[0], 16):
                return True
    return False


async def send_half(writer: asyncio.StreamWriter) -> None:
    """Send the head of an upload of two megabytes, and the first of the two."""
    writer.write(HEAD % (2 * MB) + b"x" * MB)
    await writer.drain()


async def test_an_upload_that_stalls_is_refused_and_leaves_nothing(nats_url: str) -> None:
    async with (
        connect(nats_url, "test") as bus,
        site(nats_url, upload_within_s=1.0) as at,
        connection(at) as (reader, writer),
    ):
        before = await chunks_in(bus)
        await send_half(writer)
        async with asyncio.timeout(WITHIN_S):
            while await chunks_in(bus) == before:  # half of it is in the store
                await asyncio.sleep(0.01)
            answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 400 ") and b"body_timeout" in answer
        assert await chunks_in(bus) == before
        async with at.http() as http:
            assert (await http.get("/v1/files")).json()["data"] == []


async def test_uploads_beyond_the_limit_are_told_to_come_back_and_others_are_served(
    nats_url: str,
) -> None:
    async with (
        connect(nats_url, "test") as bus,
        site(nats_url, uploads_limit=1) as at,
        at.http() as http,
    ):
        before = await chunks_in(bus)
        async with connection(at) as (_, writer):
            await send_half(writer)
            async with asyncio.timeout(WITHIN_S):
                while await chunks_in(bus) == before:
                    await asyncio.sleep(0.01)
            files = {"file": ("b.jsonl", b"{}\n")}
            refused = await http.post("/v1/files", data={"purpose": "batch"}, files=files)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "slow_down"
            assert "retry-after" in refused.headers
            body = {"prompt": "one", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        async with asyncio.timeout(WITHIN_S):  # the slow one hangs up: there is room again
            while True:
                files = {"file": ("b.jsonl", b"{}\n")}
                taken = await http.post("/v1/files", data={"purpose": "batch"}, files=files)
                if taken.status_code == 200:
                    break
                await asyncio.sleep(0.05)
        await http.delete(f"/v1/files/{taken.json()['id']}")
        assert await chunks_in(bus) == before


async def post(http: httpx.AsyncClient, size: int) -> httpx.Response:
    """Upload so many bytes at once."""
    files = {"file": ("b.jsonl", b"y" * size)}
    return await http.post("/v1/files", data={"purpose": "batch"}, files=files)


async def until_stored(bus: NatsBus, before: set[str], size: int) -> None:
    """Wait until the chunks of the one upload that is not in `before` hold so many bytes."""
    async with asyncio.timeout(WITHIN_S):
        stored = 0
        while stored < size:
            await asyncio.sleep(0.01)
            for chunks in await chunks_in(bus) - before:
                stored = sum([len(chunk.payload) async for chunk in bus.files.read(chunks)])


async def test_uploads_side_by_side_have_the_room_of_their_tenant_together(nats_url: str) -> None:
    half = MB // CHUNK_BYTES * CHUNK_BYTES
    async with (
        connect(nats_url, "test") as bus,
        site(nats_url, tenant_files_bytes=3 * MB) as at,
        at.http() as http,
    ):
        before = await chunks_in(bus)
        async with connection(at) as (reader, writer):
            await send_half(writer)
            await until_stored(bus, before, half)
            refused = await post(http, 2 * MB + MB // 2)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "slow_down")
            taken = await post(http, MB + MB // 2)  # what was refused takes no room
            assert taken.status_code == 200
            writer.write(b"x" * MB)  # for which there is no room any more
            answer = await reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 429 ") and b"slow_down" in answer
        beside = await post(http, MB + MB // 2)  # and nor does what was given up
        assert beside.status_code == 200
        assert (await post(http, 1)).status_code == 429
        for file in (taken, beside):
            await http.delete(f"/v1/files/{file.json()['id']}")
        assert await chunks_in(bus) == before
        whole = await post(http, 3 * MB)
        assert whole.status_code == 200
        await http.delete(f"/v1/files/{whole.json()['id']}")


async def test_a_refused_upload_is_told_why_though_its_chunks_cannot_be_deleted_now(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def purge(self: Objects, chunks: str) -> None:
        raise BusTimeout("no answer")

    monkeypatch.setattr(Objects, "purge", purge)
    async with site(nats_url, file_limit_bytes=MB) as at, at.http() as http:
        refused = await post(http, 2 * MB)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux bounds how long bytes may wait"
)
async def test_a_reader_of_a_file_that_reads_nothing_is_cut_off_and_another_gets_it_whole(
    nats_url: str,
) -> None:
    async with site(nats_url, stall_s=0.5) as at, at.http() as http:
        files = {"file": ("a.jsonl", FILE)}
        made = await http.post("/v1/files", data={"purpose": "batch"}, files=files)
        path = f"/v1/files/{made.json()['id']}"
        async with connection(at, receive_bytes=4096) as (_, writer):
            writer.transport.pause_reading()
            writer.write(f"GET {path}/content HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            port = writer.get_extra_info("sockname")[1]
            async with asyncio.timeout(WITHIN_S):
                while not kept_for(port):
                    await asyncio.sleep(0.01)
                assert (await http.get(f"{path}/content")).content == FILE
                while kept_for(port):
                    await asyncio.sleep(0.01)
        await http.delete(path)


async def test_an_upload_and_a_list_read_the_entries_of_their_own_tenant_alone(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def counted(raw: bytes) -> ObjectInfo | None:
        nonlocal read
        read += 1
        return info_of(raw)

    async with site(nats_url, tenant_files_limit=8) as at, at.http() as http:
        for _ in range(8):
            assert (await post_as(http, "many")).status_code == 200
        assert (await post_as(http, "many")).status_code == 429
        info_of = objects._info
        monkeypatch.setattr(objects, "_info", counted)
        ids = [(await post_as(http, "few")).json()["id"] for _ in range(2)]
        listed = await http.get("/v1/files", headers={TENANT: "few"})
        assert {file["id"] for file in listed.json()["data"]} == {*ids}
        assert read <= 4  # none and one before the uploads, two in the list
        assert len((await http.get("/v1/files", headers={TENANT: "many"})).json()["data"]) == 8


async def post_as(http: httpx.AsyncClient, tenant: str) -> httpx.Response:
    files, headers = {"file": ("b.jsonl", b"{}\n")}, {TENANT: tenant}
    return await http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)
