"""A real engine in a process of its own: the worker's NATS work and the engine's steps take no time
of the interpreter from each other.

The worker writes turns into a socket and reads back their results. A side that loses the other
stops: the engine silently, the worker with an EngineError, since the KV is gone with the engine.
`python -m services.worker.engine_process FD` is the other end.
"""

import asyncio
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from services.worker.config import WorkerConfig
from services.worker.engine import EngineFacts
from services.worker.engines.make import make
from services.worker.profiling import fit_engine
from services.worker.turn_taker import TurnTaker
from shared.core.turn import Ran, Turn
from shared.errors import ConfigError, EngineError
from shared.perf.profile_file import ProfileFile
from shared.process import logs

LENGTH = struct.Struct("<I")  # before each message
READ_BYTES = 1 << 20
# an engine whose worker is gone, or that was asked to stop, is killed after that
LEAVES_WITHIN_S = 10.0


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: EngineFacts
    fitted: ProfileFile | None


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """Why this configuration makes no engine."""

    message: str


_encode = msgspec.msgpack.Encoder().encode
_decode_start = msgspec.msgpack.Decoder(Ready | Unfit).decode
_decode_turn = msgspec.msgpack.Decoder(Turn | None).decode  # None: forget every slot
_decode_ran = msgspec.msgpack.Decoder(Ran).decode


class EngineProcess:
    """The worker's end. Implements services.worker.runner.Runner."""

    def __init__(self, line: "_Line", process: asyncio.subprocess.Process, ready: Ready) -> None:
        self._line, self._process = line, process
        self.facts, self.fitted, self.pid = ready.facts, ready.fitted, process.pid

    async def run(self, turn: Turn) -> Ran:
        return await self._ask(turn._replace(plan=None))

    async def reset(self) -> None:
        await self._ask(None)

    async def _ask(self, turn: Turn | None) -> Ran:
        try:
            return _decode_ran(await self._line.ask(_encode(turn)))
        except EOFError:
            raise EngineError(
                f"the engine's process has ended ({await _end(self._process)}), and its KV with it"
            ) from None


@asynccontextmanager
async def engine_process(
    cfg: WorkerConfig, stop: asyncio.Event
) -> AsyncIterator[EngineProcess | None]:
    """The engine that `cfg` asks for, loaded, measured and ready; None if `stop` came first. Raises
    ConfigError and EngineError.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = (sys.executable, "-m", "services.worker.engine_process", str(theirs.fileno()))
            process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),))
        line = _Line(ours)
        try:
            yield await _started(line, process, cfg, stop)
        finally:
            line.close()
            await _end(process)


async def _started(
    line: "_Line", process: asyncio.subprocess.Process, cfg: WorkerConfig, stop: asyncio.Event
) -> EngineProcess | None:
    starting, stopped = (
        asyncio.ensure_future(line.ask(_encode(cfg))),
        asyncio.ensure_future(stop.wait()),
    )
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            process.kill()
            return None
        answer: Ready | Unfit = _decode_start(await starting)
    except EOFError:
        raise EngineError(
            f"the engine's process ended before it was ready ({await _end(process)})"
        ) from None
    finally:
        starting.cancel()
        stopped.cancel()
    if isinstance(answer, Unfit):
        raise ConfigError(answer.message)
    return EngineProcess(line, process, answer)


class _Line:
    """Questions and answers over a socket, in order; an answer that no task waits for any more is
    dropped.

    There are no streams or tasks between: those write once the event loop has done everything else,
    and read two rounds of it later.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._unsent, self._got, self._ended = bytearray(), bytearray(), False
        self._loop.add_reader(sock, self._receive)

    def close(self) -> None:
        """Ask nothing more; the other end may leave."""
        self._loop.remove_writer(self._sock)
        self._loop.remove_reader(self._sock)
        self._sock.shutdown(socket.SHUT_WR)

    async def ask(self, message: bytes) -> bytes:
        """Raises EOFError if the other end is gone."""
        if self._ended:
            raise EOFError
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting.append(answer)
        self._unsent += _framed(message)
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
            self._ended = True
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


def _framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


async def _end(process: asyncio.subprocess.Process) -> str:
    """The exit status. The process is leaving already, and is killed if it hangs."""
    try:
        async with asyncio.timeout(LEAVES_WITHIN_S):
            status = await process.wait()
    except TimeoutError:
        process.kill()
        status = await process.wait()
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


# ---------------------------------------------------------------- the other end


def main(fd: int) -> None:
    """Serve the worker at the other end of this socket until it closes it."""
    # the worker gets the signal too, and closes the socket when it is time
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent_to_all, lambda *_: None)
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    threading.Thread(target=_die_with_the_worker, args=(fd,), daemon=True).start()
    source = sock.makefile("rb")
    cfg = msgspec.msgpack.decode(_read(source), type=WorkerConfig)
    logs.configure("worker", f"engine-{cfg.replica}-{os.getpid()}")
    try:
        engine, tokenizer = make(cfg)
    except ConfigError as error:
        _write(sock, Unfit(str(error)))
        return
    try:
        # A profile that the operator names counts; without one the engine is measured.
        fitted = None if cfg.profile or not cfg.profile_s else fit_engine(engine, cfg.profile_s)
        taker = TurnTaker(engine, tokenizer)
        gc.collect()
        # a model's Python side is a million objects, which a full collection would walk in the
        # middle of a step
        gc.freeze()
        _write(sock, Ready(engine.facts, fitted))
        while message := _read(source):
            turn = _decode_turn(message)
            if turn is None:
                taker.reset()
            _write(sock, Ran([], 0.0) if turn is None else taker.take(turn))
    except Exception:
        # the worker learns it now: a broken engine may take long to close
        sock.shutdown(socket.SHUT_WR)
        raise
    finally:
        engine.close()


def _read(source: Any) -> bytes:
    """The next message; empty at the end."""
    head = source.read(LENGTH.size)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    message = bytes(source.read(size))
    return message if len(message) == size else b""


def _write(sock: socket.socket, message: Ready | Unfit | Ran) -> None:
    sock.sendall(_framed(_encode(message)))


def _die_with_the_worker(fd: int) -> None:
    """End with the worker even if it was killed: the next engine needs the GPU's memory."""
    gone = select.poll()
    gone.register(fd, 0)
    gone.poll()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
