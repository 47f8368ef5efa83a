"""A real engine in a process of its own: what the worker does for NATS takes no time of the interpreter from a step, nor a step from that.

The worker writes turns into a socket and reads back what they did. Who loses the other end stops: the engine without a word, the worker
with an EngineError, since with the engine its KV is gone. `python -m services.worker.engine_process FD` is the other end.
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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from services.worker.config import WorkerConfig
from services.worker.engine import EngineFacts
from services.worker.engines.make import make
from services.worker.profiling import fit_engine
from services.worker.runner import Seat
from shared import logs
from shared.errors import ConfigError, EngineError
from shared.perf.store import ProfileFile
from shared.policy.turn import Ran, Turn

LENGTH = struct.Struct("<I")  # before each message
READ_BYTES = 1 << 20
LEAVES_WITHIN_S = 10.0  # an engine whose worker is gone, or that was told to stop, is ended after that


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: EngineFacts
    fitted: ProfileFile | None


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """There is no engine by this configuration, and why."""

    message: str


_encode = msgspec.msgpack.Encoder().encode
_decode_start = msgspec.msgpack.Decoder(Ready | Unfit).decode
_decode_turn = msgspec.msgpack.Decoder(Turn | None).decode  # None: forget every slot
_decode_ran = msgspec.msgpack.Decoder(Ran).decode


class EngineProcess:
    """The worker's end. Implements services.worker.runner.Runner."""

    def __init__(self, sock: socket.socket, process: asyncio.subprocess.Process, ready: Ready) -> None:
        self._sock, self._process = sock, process
        self.facts, self.fitted, self.pid = ready.facts, ready.fitted, process.pid

    async def run(self, turn: Turn) -> Ran:
        return await self._ask(turn._replace(plan=None))

    async def reset(self) -> None:
        await self._ask(None)

    async def _ask(self, turn: Turn | None) -> Ran:
        try:
            await _send(self._sock, _encode(turn))
            return _decode_ran(await _receive(self._sock))
        except (OSError, EOFError):
            status = await self._process.wait()
            raise EngineError(f"the engine's process has ended ({_ended(status)}), and its KV with it") from None


@asynccontextmanager
async def engine_process(cfg: WorkerConfig, stop: asyncio.Event) -> AsyncIterator[EngineProcess | None]:
    """The engine that `cfg` asks for, loaded, measured and ready; None if `stop` came first. Raises ConfigError and EngineError."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = (sys.executable, "-m", "services.worker.engine_process", str(theirs.fileno()))
            process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),))
        ours.setblocking(False)
        try:
            yield await _started(ours, process, cfg, stop)
        finally:
            ours.shutdown(socket.SHUT_WR)
            try:
                async with asyncio.timeout(LEAVES_WITHIN_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _started(
    sock: socket.socket, process: asyncio.subprocess.Process, cfg: WorkerConfig, stop: asyncio.Event
) -> EngineProcess | None:
    async def ready() -> Ready | Unfit:
        await _send(sock, _encode(cfg))
        answer: Ready | Unfit = _decode_start(await _receive(sock))
        return answer

    starting, stopped = asyncio.ensure_future(ready()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            process.kill()
            return None
        answer = await starting
    except (OSError, EOFError):
        raise EngineError(f"the engine's process ended before it was ready ({_ended(await process.wait())})") from None
    finally:
        starting.cancel()
        stopped.cancel()
    if isinstance(answer, Unfit):
        raise ConfigError(answer.message)
    return EngineProcess(sock, process, answer)


async def _send(sock: socket.socket, message: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, LENGTH.pack(len(message)) + message)


async def _receive(sock: socket.socket) -> bytes:
    """Raises EOFError at the end."""
    loop, got, wanted = asyncio.get_running_loop(), bytearray(), LENGTH.size
    while len(got) < wanted:
        part = await loop.sock_recv(sock, READ_BYTES)
        if not part:
            raise EOFError
        got += part
        if wanted == LENGTH.size and len(got) >= wanted:
            wanted += LENGTH.unpack_from(got)[0]
    return bytes(memoryview(got)[LENGTH.size :])


def _ended(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


# ---------------------------------------------------------------- the other end


def main(fd: int) -> None:
    """Serve the worker at the other end of this socket until it closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker hears it too, and says when it is time
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
        # What an operator says of an engine counts; what is not known is measured.
        fitted = None if cfg.profile or not cfg.profile_s else fit_engine(engine, cfg.profile_s)
        seat = Seat(engine, tokenizer)
        gc.collect()
        gc.freeze()  # a model's Python side is a million objects, which a full collection would walk in the middle of a step
        _write(sock, Ready(engine.facts, fitted))
        while message := _read(source):
            turn = _decode_turn(message)
            if turn is None:
                seat.reset()
            _write(sock, Ran([], 0.0) if turn is None else seat.take(turn))
    finally:
        engine.close()


def _read(source: Any) -> bytes:
    """The next message; empty at the end."""
    head = source.read(LENGTH.size)
    return b"" if len(head) < LENGTH.size else bytes(source.read(LENGTH.unpack(head)[0]))


def _write(sock: socket.socket, message: Ready | Unfit | Ran) -> None:
    encoded = _encode(message)
    sock.sendall(LENGTH.pack(len(encoded)) + encoded)


def _die_with_the_worker(fd: int) -> None:
    """Whoever was killed says nothing, and what comes after it needs the GPU's memory."""
    gone = select.poll()
    gone.register(fd, 0)
    gone.poll()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
