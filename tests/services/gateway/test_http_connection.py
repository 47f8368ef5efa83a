"""The deadline of a head, and what a sender of a refused body gets to read."""

import asyncio

import pytest

from tests.services.gateway.test_gateway import WITHIN_S, gateway

HEAD_S = 0.5
HALF = b"GET /health HTTP/1.1\r\nHost: a\r\n"
WHOLE = HALF + b"\r\n"


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("first", [b"", HALF, WHOLE + HALF])
async def test_a_connection_whose_head_never_ends_is_closed(nats_url: str, first: bytes) -> None:
    async with gateway(nats_url, head_within_s=HEAD_S) as (url, _, _), asyncio.timeout(10):
        reader, writer = await opened(url)
        writer.write(first[: len(WHOLE)])
        if first.startswith(WHOLE):
            assert b"200 OK" in await reader.readuntil(b'{"status":"ok"}')
            writer.write(first[len(WHOLE) :])
        assert await reader.read() == b""
        writer.close()


async def test_a_connection_with_whole_heads_stays_open(nats_url: str) -> None:
    async with gateway(nats_url, head_within_s=HEAD_S) as (url, _, _), asyncio.timeout(WITHIN_S):
        reader, writer = await opened(url)
        for _ in range(3):
            writer.write(WHOLE)
            assert b"200 OK" in await reader.readuntil(b'{"status":"ok"}')
            await asyncio.sleep(2 * HEAD_S)  # idle, beyond the deadline of a head
        writer.close()


@pytest.mark.parametrize(
    ("limits", "answer", "why"),
    [
        ({}, b"413", b"the body has more than"),
        ({"bodies_limit_bytes": 1000}, b"429", b"too many bytes of bodies"),
    ],
)
@pytest.mark.parametrize("mode", [b"close", b"keep-alive"])
async def test_a_client_that_sends_all_of_a_refused_body_first_reads_the_answer(
    nats_url: str, limits: dict[str, int], answer: bytes, why: bytes, mode: bytes
) -> None:
    size = 40_000_000 if answer == b"413" else 8_000_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: %s\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    async with gateway(nats_url, **limits) as (url, _, _), asyncio.timeout(WITHIN_S):
        reader, writer = await opened(url)
        writer.write(head % (mode, size) + b" " * size)
        await writer.drain()
        read = await reader.read()
        assert read.startswith(b"HTTP/1.1 " + answer), read
        assert why in read
        writer.close()
