"""Tests of the gateway's HTTP connections: how many there may be, and when each is closed."""

import asyncio
import resource
import socket

import httpx
import pytest

from services.gateway.config import GatewayConfig
from services.gateway.service import listen, serve, within_open_files
from shared.telemetry.telemetry import Tracing
from tests.services.gateway.site import WITHIN_S, gateway, site

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


async def opened_from(host: str, url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))


async def test_whoever_hoards_connections_loses_its_own(nats_url: str) -> None:
    """At the limit a new connection takes the place of the longest idle one of the address that has
    the most; one whose request is under way is not idle.
    """
    body = b'{"prompt": "hang", "stream": true}'
    async with site(nats_url, connections_limit=6) as a_site, asyncio.timeout(WITHIN_S):
        asking, ask = await opened_from("127.0.0.2", a_site.url)
        ask.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        ask.write(body)
        assert b" 200 " in await asking.readuntil(b"data: ")
        polite, use = await opened_from("127.0.0.3", a_site.url)
        hoarded = [await opened_from("127.0.0.2", a_site.url) for _ in range(40)]
        for reader, _ in hoarded[:35]:
            assert await reader.read() == b""
        use.write(WHOLE.replace(b"health", b"metrics"))
        page = await polite.readuntil(b"connections_closed_total 3")
        assert b"slackline_gateway_connections 6" in page
        assert not asking.at_eof()
        for writer in (ask, use, *(each for _, each in hoarded)):
            writer.close()


def test_no_more_connections_than_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    cfg = within_open_files(GatewayConfig())
    assert (cfg.connections_limit, cfg.requests_limit) == (960, 928)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert within_open_files(GatewayConfig()) == GatewayConfig()


async def test_an_idle_connection_outlives_the_patience_of_a_proxy(nats_url: str) -> None:
    assert GatewayConfig().idle_s > 60
    async with gateway(nats_url, idle_s=HEAD_S) as (url, _, _), asyncio.timeout(WITHIN_S):
        reader, writer = await opened(url)
        writer.write(WHOLE)
        assert (await reader.read()).endswith(b'{"status":"ok"}')  # to its end
        writer.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="this system has no IPv6")
@pytest.mark.parametrize(("host", "reached"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])])
async def test_ipv6_is_served(
    nats_url: str, host: str, reached: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = GatewayConfig(url=nats_url, host=host, port=0, without_keys=True)
    listener, stop = listen(cfg), asyncio.Event()
    port = listener.getsockname()[1]
    serving = asyncio.create_task(serve(cfg, listener, stop, Tracing()))
    for each in reached:
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://{each}:{port}/health")).status_code == 200
    stop.set()
    await serving
    assert f"http://[{host}]:{port}" in capsys.readouterr().out
