"""Watches what ends or fills while nobody looks: certificates, and the streams of the store."""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from shared.bus.nats import NatsBus
from shared.bus.nats_client import trusting
from shared.clock import Clock
from shared.errors import BusError, ConfigError
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry

LOOK_S = 10.0  # between two looks at the streams
CERTIFICATES_S = 60.0  # between two looks at the certificates: a handshake takes 1 ms
SHAKE_S = 5.0
WARN_S = 30 * 86_400.0
WARN_EVERY_S = 86_400.0

log = structlog.get_logger()


class Upkeep:
    """The look-out of one process. `tls_ca`: the file of the authority that it trusts, or empty;
    `own_end_unix_s`: the end of a certificate of its own, if it has one.
    """

    def __init__(
        self,
        bus: NatsBus,
        clock: Clock,
        metrics: Registry,
        tls_ca: str,
        own_end_unix_s: Callable[[], float] | None = None,
    ) -> None:
        self._bus, self._clock, self._tls_ca = bus, clock, tls_ca
        self._own_end_unix_s = own_end_unix_s
        self._bytes = metrics.gauge(names.STREAM_BYTES, "Size of a stream.", ("stream",))
        self._limits = metrics.gauge(names.STREAM_LIMIT, "The most that it holds.", ("stream",))
        self._ends = metrics.gauge(
            names.CERTIFICATE_END, "When a certificate ends, Unix time.", ("certificate",)
        )
        self._warned_unix_s: dict[str, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        loop, next_s = asyncio.get_running_loop(), 0.0
        while True:
            await self.look_at_streams()
            if loop.time() >= next_s:
                next_s = loop.time() + CERTIFICATES_S
                await self.look_at_certificates()
            await asyncio.sleep(LOOK_S)

    async def look_at_streams(self) -> None:
        with suppress(BusError):  # the next look follows
            for name, size in (await self._bus.stream_sizes()).items():
                self._bytes.labels(name).set(size.size_bytes)
                self._limits.labels(name).set(size.limit_bytes)

    async def look_at_certificates(self) -> None:
        if self._own_end_unix_s is not None:
            self._show("gateway", self._own_end_unix_s())
        if not self._tls_ca:
            return
        with suppress(OSError, ValueError):  # the file is being replaced
            self._show("authority", end_unix_s(Path(self._tls_ca)))
        server = self._bus.server
        if server is None:
            return
        try:
            self._show("nats", await shown_end_unix_s(*server, trusting(self._tls_ca)))
        except (OSError, ValueError, ConfigError) as error:
            log.warning("certificate.unseen", server=server, error=repr(error))

    def _show(self, name: str, ends_unix_s: float) -> None:
        """Export the end of a certificate, and log it if it is near."""
        self._ends.labels(name).set(ends_unix_s)
        now = self._clock.unix_s()
        warned = self._warned_unix_s.get(name, 0.0)
        if ends_unix_s - now < WARN_S and now - warned >= WARN_EVERY_S:
            self._warned_unix_s[name] = now
            days = round((ends_unix_s - now) / 86_400.0, 1)
            log.warning("certificate.ends", certificate=name, days=days)


def end_unix_s(file: Path) -> float:
    """The end of the first certificate in a PEM file. Raises OSError, ValueError."""
    from cryptography import x509  # a process without TLS needs no cryptography

    return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp()


async def shown_end_unix_s(host: str, port: int, context: ssl.SSLContext) -> float:
    """The end of the certificate that a NATS server shows to new connections: those that it has
    keep the one before. Raises OSError, ValueError.
    """
    async with asyncio.timeout(SHAKE_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            await reader.readline()  # its INFO, after which both turn to TLS
            await writer.start_tls(context, server_hostname=host)
            shown = writer.get_extra_info("peercert")
        finally:
            writer.close()
    return float(ssl.cert_time_to_seconds(shown["notAfter"]))
