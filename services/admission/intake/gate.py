"""Keeps the endpoint for requests open while the store takes writes. While the endpoint is closed,
requests go to another instance or are refused at once; `infra/health.py requests`, `/ready` fail.
"""

import asyncio
from contextlib import suppress

import structlog

from shared.bus.api import LEASE_TTL_S, Bus, Endpoint, KeyValue, Subscription
from shared.clock import Clock
from shared.errors import BusError

log = structlog.get_logger()

PROBE_S = 1.0
CLOSED_PROBE_S = 0.2
PROBE_TTL_S = 1.0


class IntakeGate:
    """Serves one endpoint until LEASE_TTL_S after its last write: by then its lease is lost."""

    def __init__(self, bus: Bus, clock: Clock, endpoint: Endpoint, instance: str) -> None:
        self._bus, self._clock = bus, clock
        self._endpoint, self._instance = endpoint, instance
        self._open: Subscription | None = None

    async def keep(self) -> None:
        """Open and close as the store allows, until cancelled."""
        written_unix_s, probes = self._clock.unix_s(), 0
        while True:
            probes += 1
            if await _takes_writes(self._bus.requests, f"p.{self._instance}.{probes}"):
                written_unix_s = self._clock.unix_s()
                if self._open is None:
                    await self._let_in()
            elif self._open and self._clock.unix_s() - written_unix_s >= LEASE_TTL_S:
                log.error("store.unwritable", instance=self._instance)
                await self.close()
            await asyncio.sleep(PROBE_S if self._open else CLOSED_PROBE_S)

    async def close(self) -> None:
        """Let no more requests in; those received before are handled."""
        door, self._open = self._open, None
        if door is not None:
            await door.stop()

    async def _let_in(self) -> None:
        with suppress(BusError):  # the next probe tries again
            self._open = await self._bus.serve(
                self._endpoint.name, [self._endpoint], {"instance": self._instance}
            )
            log.info("door.open", instance=self._instance)


async def _takes_writes(bucket: KeyValue, key: str) -> bool:
    try:
        await bucket.create(key, b"", ttl_s=PROBE_TTL_S)
    except BusError:
        return False
    return True
