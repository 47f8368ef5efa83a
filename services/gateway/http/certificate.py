"""The gateway's TLS certificate, taken anew when its files change: no restart cuts streams."""

import asyncio
import ssl
from pathlib import Path

import structlog

from services.gateway.config import GatewayConfig
from shared.errors import ConfigError
from shared.process.upkeep import end_unix_s

LOOK_S = 1.0  # between two looks at the files

log = structlog.get_logger()


class Certificate:
    """A certificate and its key, in two PEM files."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._cert, self._key = Path(cert), Path(key)
        self._taken = self._stamp()
        self.end_unix_s = self._check()

    async def follow(self, context: ssl.SSLContext) -> None:
        """Let new connections see what is written into the files, until cancelled. They are read
        once they have not changed for LOOK_S. A pair that does not fit is refused, and logged.
        """
        seen = self._taken
        while True:
            await asyncio.sleep(LOOK_S)
            before, seen = seen, self._stamp()
            if seen == self._taken or seen != before:
                continue
            self._taken = seen
            try:
                end = self._check()  # first elsewhere: a faulty pair would break the one in use
                context.load_cert_chain(self._cert, self._key)
            except (ConfigError, OSError) as error:
                log.error("certificate.refused", error=str(error))
                continue
            self.end_unix_s = end
            log.info("certificate.taken", ends_unix_s=end)

    def _check(self) -> float:
        """The end of the certificate. Raises ConfigError if it cannot be used."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self._cert, self._key
            )
            return end_unix_s(self._cert)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(f"gateway: {self._cert}, {self._key}: {error}") from error

    def _stamp(self) -> list[tuple[int, int]]:
        """Time and size of the files; those that are not there have none."""
        found = [file.stat() for file in (self._cert, self._key) if file.exists()]
        return [(status.st_mtime_ns, status.st_size) for status in found]


def certificate_of(cfg: GatewayConfig) -> Certificate | None:
    """The certificate that a gateway is to show, if any. Raises ConfigError."""
    return Certificate(cfg.tls_cert, cfg.tls_key) if cfg.tls_cert else None
