"""HTTP connections: uvicorn's, limited in number, with deadlines for heads and slow readers."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.clock import Clock
from shared.process import logs
from shared.telemetry.instruments import Registry

LET_IN = "let_in"  # in the state of a request's scope: call it once its sender may ask
SAY_S = 60.0  # between two lines of the log
TOGETHER_BYTES = 16 * 1024  # more leaves at once
log = logs.logger()


class Connections:
    """The open connections, `limit` at most. At the limit a new one takes the place of the one that
    is idle for longest, at the peer address with the most idle ones: hoarders lose their own. A
    connection is idle unless it answers a request that was let in.
    """

    def __init__(self, limit: int, registry: Registry, clock: Clock) -> None:
        self._limit, self._clock = limit, clock
        self._open = 0
        # of each peer, the one idle for longest first
        self._idle: dict[str, dict[Connection, None]] = {}
        self._closed_since_said, self._said_unix_s = 0, 0.0
        self._gauge = registry.gauge(
            "slackline_gateway_connections", "Open connections of clients."
        ).labels()
        self._closed = registry.counter(
            "slackline_gateway_connections_closed_total",
            "Connections closed because there were too many.",
        ).labels()

    def add(self, connection: "Connection") -> None:
        """Count a new, idle connection. Beyond the limit an idle one is closed, maybe itself."""
        self._count(1)
        self.idle(connection)
        if self._open > self._limit:
            peer = max(self._idle, key=lambda each: len(self._idle[each]))
            next(iter(self._idle[peer])).abort()
            self._closed.add()
            self._say(peer)

    def drop(self, connection: "Connection") -> None:
        self.used(connection)
        self._count(-1)

    def idle(self, connection: "Connection") -> None:
        self._idle.setdefault(connection.peer, {})[connection] = None

    def used(self, connection: "Connection") -> None:
        mates = self._idle.get(connection.peer, {})
        mates.pop(connection, None)
        if not mates:
            self._idle.pop(connection.peer, None)

    def _count(self, more: int) -> None:
        self._open += more
        self._gauge.set(self._open)

    def _say(self, peer: str) -> None:
        self._closed_since_said += 1
        now = self._clock.unix_s()
        if now - self._said_unix_s >= SAY_S:
            closed, limit = self._closed_since_said, self._limit
            log.warning("connections.full", limit=limit, closed=closed, most_idle=peer)
            self._closed_since_said, self._said_unix_s = 0, now


class Together:
    """Sends all that one turn of the loop writes in one system call, since each takes 50 us."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []
        self._bytes = 0

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)
        self._bytes += len(data)
        if self._bytes > TOGETHER_BYTES:
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._written and not self._transport.is_closing():
            self._transport.write(b"".join(self._written))
        self._written.clear()
        self._bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """One connection, closed unless a whole head comes `head_within_s` after its opening or last
    use. On Linux the kernel closes it once bytes have waited `unread_s`, too: a close from here
    would wait for that client for ever.
    """

    all: Connections
    head_within_s: float
    unread_s: float
    peer: str = ""
    _head: asyncio.TimerHandle | None = None
    _counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", Together(transport, self.loop))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            unread_ms = max(1, round(1e3 * self.unread_s))
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        self.app_state = {**self.app_state, LET_IN: self._let_in}
        self.peer = _peer_of(transport.get_extra_info("peername"))
        self._counted = True
        self._await_head()
        self.all.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def on_response_complete(self) -> None:
        if self._counted:
            self.all.used(self)
            self.all.idle(self)  # from now on
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self._uncount()

    def abort(self) -> None:
        """Close it at once; it counts no more."""
        self._uncount()
        self._stop_timer()
        self.transport.abort()

    def _let_in(self) -> None:
        self.all.used(self)

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self.all.drop(self)

    def _await_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head is None and self._counted:
            self._head = self.loop.call_later(self.head_within_s, self._late)

    def _stop_timer(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _late(self) -> None:
        self._head = None
        if self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_handler()


def connection_class(
    connections: Connections, head_within_s: float, unread_s: float
) -> type[Connection]:
    """The class of connections with these deadlines: uvicorn makes them of a class."""
    own = {"all": connections, "head_within_s": head_within_s, "unread_s": unread_s}
    return type("Connection", (Connection,), own)


def let_in(state: dict[str, Any]) -> None:
    """Say that the sender of a request, with this state of its scope, may ask."""
    told: Callable[[], None] | None = state.get(LET_IN)
    if told is not None:
        told()


def _peer_of(address: Any) -> str:
    """The address of a client without its port; of IPv6 the network, which one client has whole."""
    host: str = address[0] if address else ""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    network = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
    return socket.inet_ntop(socket.AF_INET6, network + bytes(8))
