"""One HTTP connection: uvicorn's, with deadlines for a head and for a client that reads nothing."""

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """A connection that is closed unless a whole head comes `head_within_s` after it opened, or
    after the first byte that follows an answer. Where the kernel can (Linux), it is also closed
    once bytes have waited `unread_s` for the client to take them: a close from here would wait for
    that client for ever.
    """

    head_within_s: float
    unread_s: float
    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            unread_ms = max(1, round(1e3 * self.unread_s))
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _await_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head is None:
            self._head = self.loop.call_later(self.head_within_s, self._late)

    def _stop_timer(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _late(self) -> None:
        self._head = None
        if self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_handler()


def connection_class(head_within_s: float, unread_s: float) -> type[Connection]:
    """The class of connections with these deadlines: uvicorn makes them of a class."""
    deadlines = {"head_within_s": head_within_s, "unread_s": unread_s}
    return type("Connection", (Connection,), deadlines)
