"""Reads a body within bounds on its size, its time, and the size of all bodies together."""

import asyncio
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from services.gateway import envelope
from services.gateway.config import GatewayConfig
from services.gateway.envelope import Rejected

# A body over the limit is read and dropped up to this many times the limit, so that its sender gets
# the reason.
SKIM_FACTOR = 4


class Bodies:
    """All bodies that are being read."""

    def __init__(self, cfg: GatewayConfig) -> None:
        self._cfg = cfg
        self._kept_bytes = 0

    async def read(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """Reads a whole body. Raises Rejected past a bound, ClientDisconnect."""
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > SKIM_FACTOR * self._cfg.body_limit_bytes:
            raise Rejected(envelope.BODY_TOO_LARGE)
        try:
            async with asyncio.timeout(self._cfg.body_within_s):
                return await self._read(receive)
        except TimeoutError:
            raise Rejected(envelope.BODY_TOO_SLOW) from None

    async def _read(self, receive: Receive) -> bytes:
        limit, taken, kept = self._cfg.body_limit_bytes, 0, bytearray()
        try:
            more = True
            while more and taken <= SKIM_FACTOR * limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                taken += len(part)
                if taken <= limit:
                    kept += part
                    self._kept_bytes += len(part)
                if self._kept_bytes > self._cfg.bodies_limit_bytes:
                    raise Rejected(envelope.SATURATED)
        finally:
            self._kept_bytes -= len(kept)
        if taken > limit:
            raise Rejected(envelope.BODY_TOO_LARGE)
        return bytes(kept)
