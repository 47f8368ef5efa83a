"""Sends messages over a socket between a worker and a child process, each behind its length."""

import asyncio
import socket
import struct
from collections import deque
from typing import Any

LENGTH = struct.Struct("<I")  # before each message
READ_BYTES = 1 << 20


class Line:
    """Questions and answers over a socket, in order; an answer that nobody awaits is dropped.
    Streams or tasks between would write and read some rounds of the event loop later.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._unsent, self._got, self.ended = bytearray(), bytearray(), False
        self._loop.add_reader(sock, self._receive)

    def close(self) -> None:
        """Ask nothing more; the other end may leave."""
        self._loop.remove_writer(self._sock)
        self._loop.remove_reader(self._sock)
        self._sock.shutdown(socket.SHUT_WR)

    async def ask(self, message: bytes) -> bytes:
        """Raises EOFError if the other end is gone."""
        if self.ended:
            raise EOFError
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting.append(answer)
        self._unsent += framed(message)
        self._send()
        return await answer

    def _send(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the other end is gone: the reader notices it, too
        if self._unsent:
            self._loop.add_writer(self._sock, self._send)
        else:
            self._loop.remove_writer(self._sock)

    def _receive(self) -> None:
        try:
            part = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self.ended = True
            self._loop.remove_reader(self._sock)
            for answer in self._waiting:
                if not answer.done():
                    answer.set_exception(EOFError())
            return
        self._got += part
        while len(self._got) >= LENGTH.size and len(self._got) >= (
            end := LENGTH.size + LENGTH.unpack_from(self._got)[0]
        ):
            answer, message = self._waiting.popleft(), bytes(self._got[LENGTH.size : end])
            del self._got[:end]
            if not answer.done():
                answer.set_result(message)


def framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def read(source: Any) -> bytes:
    """The next message; empty at the end."""
    head = source.read(LENGTH.size)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    message = bytes(source.read(size))
    return message if len(message) == size else b""
