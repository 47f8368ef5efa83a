"""Tests of the way to a server that is no help: `connect` ends within its limit all the same."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shared.bus.nats import CLOSE_S, connect
from shared.bus.users import Role, User
from shared.errors import ConfigError

CONNECT_S = 0.3
# what a busy machine may add; what hangs, hangs for ever, or for as long as the store is asked
LATE_S = 2.0
INFO = json.dumps(
    {"server_id": "x", "version": "2.11.0", "max_payload": 8388608, "headers": True, "proto": 1}
)
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(talk: Talk) -> AsyncIterator[str]:
    """A TCP server that talks so with each client; yields its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await talk(reader, writer)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"nats://{host}:{port}"
    finally:
        server.close()


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def says_info_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(f"INFO {INFO}\r\n".encode())
    await reader.read()


async def closes_after_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(f"INFO {INFO}\r\n".encode())
    await reader.readuntil(b"PING\r\n")
    writer.close()


async def refuses_the_key(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(f"INFO {INFO}\r\n".encode())
    await reader.readuntil(b"PING\r\n")
    writer.write(b"-ERR 'Authorization Violation'\r\n")
    writer.close()


async def takes_no_questions(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """It lets the client in, and answers nothing about the streams."""
    writer.write(f"INFO {INFO}\r\n".encode())
    while line := await reader.readline():
        if line.startswith(b"PING"):
            writer.write(b"PONG\r\n")


async def revokes_a_key_just_let_in(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(f"INFO {INFO}\r\n".encode())
    await reader.readuntil(b"PING\r\n")
    writer.write(b"PONG\r\n")
    await reader.readuntil(b"SUB")
    writer.write(b"-ERR 'User Authentication Revoked'\r\n")
    writer.close()


async def in_time(url: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConfigError):
        async with connect(url, "x", User(Role.ADMISSION), connect_s=CONNECT_S):
            pass
    assert time.monotonic() - began_s < CONNECT_S + CLOSE_S + LATE_S


@pytest.mark.parametrize(
    "talk",
    [
        says_nothing,
        says_info_only,
        closes_after_connect,
        refuses_the_key,
        takes_no_questions,
        revokes_a_key_just_let_in,
    ],
)
async def test_whatever_the_server_does_the_limit_holds(talk: Talk) -> None:
    async with asyncio.timeout(20.0), served(talk) as url:
        await in_time(url)


async def test_an_answer_that_comes_with_the_limit_does_not_lift_it() -> None:
    """asyncio.wait_for() of Python 3.11 swallows a cancellation that comes with what it waits for:
    a client that was just refused would try again for ever.
    """
    loop = asyncio.get_running_loop()
    limit_at_s = loop.time() + CONNECT_S

    async def refuses_at_the_limit(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(f"INFO {INFO}\r\n".encode())
        await reader.readuntil(b"PING\r\n")

        def refuse() -> None:
            """The loop is busy from the refusal on until the limit is over, and sees both then."""
            writer.write(b"-ERR 'Authorization Violation'\r\n")
            time.sleep(max(0.0, limit_at_s + 0.05 - loop.time()))

        loop.call_at(limit_at_s - 0.02, refuse)
        await reader.read()

    async with asyncio.timeout(20.0), served(refuses_at_the_limit) as url:
        await in_time(url)
