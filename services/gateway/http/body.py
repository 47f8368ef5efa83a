"""Reads the body of a request, within bounds on its size, its time and the bytes of all bodies."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Mapping
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from services.gateway.config import GatewayConfig
from services.gateway.http import envelope
from services.gateway.http.envelope import Rejected
from shared.core.shared_room import Shares

# A refused body is read and dropped up to these, so that its sender gets to the answer.
DROP_BYTES = 64 * 1024 * 1024
DROP_S = 10.0
PLAIN = "identity"  # the Content-Encoding of a body that is not compressed


class Arriving:
    """A body on its way. Called, it gives the next message of the client."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.whole = False  # no more of it comes

    async def __call__(self) -> Message:
        message = await self._receive()
        self.whole = not message.get("more_body", False)
        return message

    async def drop(self) -> None:
        """Read the rest and keep nothing, up to DROP_BYTES and for DROP_S."""
        dropped = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DROP_S):
                while not self.whole and dropped <= DROP_BYTES:
                    dropped += len((await self()).get("body", b""))


class Bodies:
    """The bodies that are being read, whose bytes in memory have a common bound."""

    def __init__(self, cfg: GatewayConfig) -> None:
        self._cfg = cfg
        self._kept = Shares(cfg.bodies_limit_bytes)

    async def read(
        self, headers: Mapping[str, str], receive: Receive, tenant: str, weight: float
    ) -> bytes:
        """A whole body. Raises Rejected past a bound or for a compressed one, ClientDisconnect."""
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._cfg.body_limit_bytes:
            raise Rejected(envelope.body_too_large(self._cfg.body_limit_bytes))
        try:
            async with asyncio.timeout(self._cfg.body_within_s):
                raw = await self._read(receive, tenant, weight)
        except TimeoutError:
            raise Rejected(envelope.BODY_TOO_SLOW) from None
        encoding = headers.get("content-encoding", PLAIN)
        if encoding != PLAIN and not raw.lstrip().startswith(b"{"):  # some name one and use none
            raise Rejected(envelope.body_encoded(encoding))
        return raw

    async def _read(self, receive: Receive, tenant: str, weight: float) -> bytes:
        kept, counted = bytearray(), 0
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                kept += part
                if len(kept) > self._cfg.body_limit_bytes:
                    raise Rejected(envelope.body_too_large(self._cfg.body_limit_bytes))
                if not self._kept.fits(tenant, weight, len(part)):
                    raise Rejected(envelope.BODIES_FULL)
                if part:
                    self._kept.take(tenant, weight, len(part))
                    counted += len(part)
        finally:
            if counted:
                self._kept.give(tenant, counted)
        return bytes(kept.removeprefix(BOM_UTF8))
