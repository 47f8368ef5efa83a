"""nats-py's client for the bus, with five repairs, and with a login by key."""

import asyncio
import logging
import ssl
from typing import Any

import nats.errors
from nats.aio.client import PING_PROTO, Client
from nats.aio.transport import TcpTransport

from shared.errors import ConfigError


class OrderedClient(Client):
    """A client whose PING waits behind the commands before it, whose read loop survives the PONG of
    a cancelled flush(), whose flush() can be cancelled at any time, that joins messages for TLS,
    and that does not wait for a lost connection to close.

    nats-py 2.16 writes a PING at once, so flush() and drain() may be confirmed before earlier
    commands are sent: a subscriber is not there yet, a drained one loses messages. The PONG of a
    cancelled flush() ends its read loop. A cancellation that comes with the PONG is lost
    (asyncio.wait_for() of Python 3.11): the service never stops. Over TLS it sends each message in
    a record of its own; here the messages of one turn leave together. Before it connects anew it
    waits for the old connection to close, which takes TLS 30 s with a silent server, and waiting
    bytes a quarter of an hour.
    """

    def log_in(self, creds: str) -> dict[str, Any]:
        """The options of `connect` to log in with a seed, or a JWT and seed. Raises ConfigError.
        nats-py's own way needs two more packages (nkeys, PyNaCl).
        """
        from shared.bus.nkey import read_login  # a bus without a key needs no cryptography

        login = read_login(creds)
        self._public_nkey = login.public
        options: dict[str, Any] = {"signature_cb": login.sign}
        return options | ({"user_jwt_cb": login.jwt.encode} if login.jwt else {})

    async def _send_ping(self, future: "asyncio.Future[Any] | None" = None) -> None:
        self._pongs.append(asyncio.get_running_loop().create_future() if future is None else future)
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def flush(self, timeout: float = 10.0) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        confirmed = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._send_ping(confirmed)
                await confirmed
        except TimeoutError as error:
            raise nats.errors.FlushTimeoutError from error

    async def _flusher(self) -> None:
        if isinstance(transport := self._transport, TcpTransport):

            def write_together(lines: list[bytes]) -> None:
                transport.write(b"".join(lines))

            transport.writelines = write_together  # type: ignore[method-assign]
        await super()._flusher()

    async def _attempt_reconnect(self) -> None:
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()
        await super()._attempt_reconnect()

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


def trusting(ca: str) -> ssl.SSLContext:
    """TLS that trusts only certificates of the authority in this file. Raises ConfigError."""
    logging.getLogger("asyncio").addFilter(_not_of_eof)
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # also an SSLError: not a certificate
        raise ConfigError(f"the certificate of the authority, {ca}: {error}") from error


def _not_of_eof(record: logging.LogRecord) -> bool:
    """False for asyncio's warning at the end of each connection that nats-py made over TLS."""
    return "eof_received" not in str(record.msg)
