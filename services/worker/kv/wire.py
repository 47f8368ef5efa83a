"""The messages with which workers give each other KV, over TCP: each behind its length, and none
longer than MOST_BYTES.

    client            server
    Ask           ->
                  <-  Welcome, or Refused and the end
    Go            ->
                  <-  Blocks, again and again, each with its bytes unless `shared`; then End
    Taken, Hurry  ->  at any time

There is no authentication: the hash of a block, 16 bytes of blake2b over its text, is what entitles
to its KV. So keep the port within the fleet. A reader knows that the bytes are those that the other
engine gave; that they are right he must believe.
"""

import asyncio
import hashlib
import socket
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.worker.engines.shelf import ShelfAt
from services.worker.line import LENGTH, framed
from shared.errors import UNDECODABLE, PeerError
from shared.vocabulary import Count

MOST_BLOCKS = 1 << 14  # of an ask: a quarter of a million tokens in blocks of 16
MOST_OF_A_MESSAGE = 1 << 10  # blocks
MOST_BYTES = 1 << 20
# seconds in which the other end takes or gives a message, or the bytes of a block
STEP_S = 10.0

Digest = Annotated[bytes, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(max_length=256)]
Numbers = Annotated[list[Count], Meta(max_length=MOST_OF_A_MESSAGE)]


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give these blocks. `waits`: also those that are yet to be computed, until Hurry. `probe`: so
    many rows of anything instead, to measure the link.
    """

    layout: Name
    replica: Name
    digests: Annotated[list[Digest], Meta(max_length=MOST_BLOCKS)] = []
    waits: bool = False
    probe: Annotated[int, Meta(ge=0, le=MOST_OF_A_MESSAGE)] = 0


class Welcome(msgspec.Struct, frozen=True, tag=True):
    shelf: ShelfAt


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: Name


class Go(msgspec.Struct, frozen=True, tag=True):
    """`shared`: the rows of the shelf are read in place."""

    shared: bool


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """Blocks by their number in the ask, the digest of each one's bytes, and its row."""

    numbers: Numbers
    checks: Annotated[list[Digest], Meta(max_length=MOST_OF_A_MESSAGE)]
    rows: Numbers


class Taken(msgspec.Struct, frozen=True, tag=True):
    """These rows were read, and may be used for others."""

    rows: Numbers


class Hurry(msgspec.Struct, frozen=True, tag=True):
    """Wait for no block any more: what is not there now is not coming."""


class End(msgspec.Struct, frozen=True, tag=True):
    """There are no more blocks."""


Message = Ask | Welcome | Refused | Go | Blocks | Taken | Hurry | End

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Wire:
    """A connection. All of its calls raise OSError if the other end is gone, TimeoutError if it is
    too slow, and PeerError for what cannot be.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._loop = sock, asyncio.get_running_loop()

    async def send(self, message: Message, payloads: Sequence[memoryview] = ()) -> None:
        parts: list[bytes | memoryview] = [framed(_encode(message)), *payloads]
        for part in parts:
            async with asyncio.timeout(STEP_S):
                await self._loop.sock_sendall(self._sock, part)

    async def read(self, kind: Any, within_s: float | None = STEP_S) -> Any:
        """The next message, which is of this type. `within_s`: in which it begins; None: ever."""
        head = bytearray(LENGTH.size)
        async with asyncio.timeout(within_s):
            await self._fill(memoryview(head))
        (size,) = LENGTH.unpack(head)
        if size > MOST_BYTES:
            raise PeerError(f"a message of {size} bytes")
        body = bytearray(size)
        async with asyncio.timeout(STEP_S):
            await self._fill(memoryview(body))
        try:
            message = _decode(body)
        except UNDECODABLE as error:
            raise PeerError(f"no message of ours: {error}") from error
        if not isinstance(message, kind):
            raise PeerError(f"{type(message).__name__} is out of turn")
        return message

    async def read_into(self, row: memoryview) -> None:
        """The bytes of a block."""
        async with asyncio.timeout(STEP_S):
            await self._fill(row)

    async def _fill(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            got = await self._loop.sock_recv_into(self._sock, view[at:])
            if not got:
                raise ConnectionResetError("the connection has ended")
            at += got

    def close(self) -> None:
        self._sock.close()


def checks_of(payloads: Sequence[memoryview]) -> list[bytes]:
    """Digests of the bytes of blocks, against damage on their way."""
    return [hashlib.sha256(each).digest()[:16] for each in payloads]


async def connect(address: str) -> Wire:
    """Raises OSError, TimeoutError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(STEP_S):
        found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, proto, _, at = found[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, at)
        except BaseException:
            sock.close()
            raise
    return Wire(sock)
