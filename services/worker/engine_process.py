"""Runs a real engine in a process of its own: NATS and steps share no interpreter.
Steps go through a socket, results come back. A side that loses the other stops: the engine
silently, the worker with an EngineError. `python -m services.worker.engine_process FD` is the other
end.
"""

import asyncio
import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from services.worker.config import WorkerConfig
from services.worker.engine import EngineFacts
from services.worker.engines.kv_calls import BringIn, KvAnswer, KvCall, Look, TakeOut
from services.worker.engines.make import make
from services.worker.engines.profiling import fit_engine
from services.worker.grammar_trial import GrammarTrial, What
from services.worker.line import Line, framed, read
from services.worker.runner import Steps
from services.worker.step_runner import StepRunner
from shared import features
from shared.core.worker.step import Ran, Step
from shared.errors import ConfigError, EngineError
from shared.models import shipped as models
from shared.perf.profile_file import ProfileFile
from shared.process import logs
from shared.process.chores import before
from shared.structured import Structured

# an engine whose worker is gone, or that was asked to stop, is killed after this
LEAVES_WITHIN_S = 10.0
BEAT_S = 1.0  # of the watchdog
# times its prediction: prefills of an engine that was never measured are that far off
SLOWER = 20.0


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: EngineFacts
    fitted: ProfileFile | None


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """Why this configuration makes no engine."""

    message: str


_encode = msgspec.msgpack.Encoder().encode
_decode_start = msgspec.msgpack.Decoder(Ready | Unfit).decode
# None: forget every slot
_decode_ask = msgspec.msgpack.Decoder(Step | Look | TakeOut | BringIn | None).decode
_decode_ran = msgspec.msgpack.Decoder(Ran).decode
_decode_kv = msgspec.msgpack.Decoder(KvAnswer).decode


class EngineProcess:
    """The worker's end of the socket. Implements Runner (services/worker/runner.py)."""

    def __init__(
        self,
        line: Line,
        process: asyncio.subprocess.Process,
        ready: Ready,
        trial: GrammarTrial | None,
        silent_s: float,
    ) -> None:
        self._line, self._process, self._trial = line, process, trial
        self.facts, self.fitted, self.pid = ready.facts, ready.fitted, process.pid
        self.steps = Steps()
        self.watchdog = Watchdog(silent_s, process.kill)

    async def run(self, step: Step) -> Ran:
        predicted_s = 0.0 if step.plan is None else step.plan.predicted_s
        return self.steps.over(await self._ask(step._replace(plan=None), predicted_s))

    async def kv(self, call: KvCall) -> KvAnswer:
        try:
            return _decode_kv(await self._line.ask(_encode(call)))
        except EOFError:  # whose step it ends says how
            raise EngineError("the engine's process has ended, and its KV with it") from None

    async def reset(self) -> None:
        await self._ask(None, 0.0)

    async def refusal(self, wanted: Structured) -> str:
        return "" if self._trial is None else await self._trial.refusal(wanted)

    async def _ask(self, step: Step | None, predicted_s: float) -> Ran:
        idle = self._line.ended
        self.watchdog.asked(predicted_s)
        try:
            return _decode_ran(await self._line.ask(_encode(step)))
        except EOFError:
            how = await _end(self._process)
            raise EngineError(
                self.watchdog.fired
                or f"the engine's process has ended ({how}), and its KV with it",
                in_turn=not idle,
            ) from None
        finally:
            self.watchdog.answered()


class Watchdog:
    """Ends an engine that does not answer: only time tells an endless computation from a slow one.
    It counts beats of the event loop, so time in which the worker was stopped, too, is no silence.
    """

    def __init__(self, silent_s: float, kill: Callable[[], None]) -> None:
        """`silent_s`: as in WorkerConfig."""
        self._silent_s, self._kill = silent_s, kill
        self._predicted_s: float | None = None  # of the step under way; None: there is none
        self._beats = 0  # since the step was asked for
        self.fired = ""  # why the engine was killed; empty: it was not
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def asked(self, predicted_s: float) -> None:
        self._predicted_s, self._beats = predicted_s, 0

    def answered(self) -> None:
        self._predicted_s = None

    def close(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self._beats += 1
        predicted_s = self._predicted_s
        if predicted_s is not None and self._beats * BEAT_S > max(
            self._silent_s, SLOWER * predicted_s
        ):
            self.fired = (
                f"the engine gave no answer for {self._beats * BEAT_S:g} s to an iteration that "
                f"was predicted to take {predicted_s:.3g} s: it was ended, and its KV with it"
            )
            self._kill()
            return
        self._timer = self._loop.call_later(BEAT_S, self._beat)


@asynccontextmanager
async def engine_process(
    cfg: WorkerConfig, stop: asyncio.Event
) -> AsyncIterator[EngineProcess | None]:
    """The engine, ready; None if `stop` came first. Raises ConfigError, EngineError."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = (sys.executable, "-m", "services.worker.engine_process", str(theirs.fileno()))
            process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),))
        line = Line(ours)
        try:
            ready = await _started(line, process, cfg, stop)
            if ready is None:
                yield None
                return
            trial = _trial(cfg, ready.facts)
            engine = EngineProcess(line, process, ready, trial, cfg.silent_s)
            try:
                yield engine
            finally:
                engine.watchdog.close()
                if trial is not None:
                    await trial.close()
        finally:
            line.close()
            await _end(process)


def _trial(cfg: WorkerConfig, facts: EngineFacts) -> GrammarTrial | None:
    """The trial of formats, for an engine that can hold an output to one."""
    if features.STRUCTURED not in facts.features:
        return None
    compiler = "llguidance"
    if cfg.engine == "vllm":
        chosen = cfg.vllm.get("structured_outputs_config", {}).get("backend", "xgrammar")
        compiler = "llguidance" if chosen == "guidance" else "xgrammar"
    folder = str(models.folder(cfg.model or models.DEFAULT))
    trial = GrammarTrial(What(compiler, folder, facts.vocabulary, sorted(facts.eos_token_ids)))
    trial.start()
    return trial


async def _started(
    line: Line, process: asyncio.subprocess.Process, cfg: WorkerConfig, stop: asyncio.Event
) -> Ready | None:
    try:
        answer = await before(stop, line.ask(_encode(cfg)))
    except EOFError:
        raise EngineError(
            f"the engine's process ended before it was ready ({await _end(process)})"
        ) from None
    if answer is None:
        process.kill()
        return None
    ready: Ready | Unfit = _decode_start(answer)
    if isinstance(ready, Unfit):
        raise ConfigError(ready.message)
    return ready


async def _end(process: asyncio.subprocess.Process) -> str:
    """The exit status. The process is leaving already, and is killed if it hangs."""
    try:
        async with asyncio.timeout(LEAVES_WITHIN_S):
            status = await process.wait()
    except TimeoutError:
        process.kill()
        status = await process.wait()
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


# ---------------------------------------------------------------- the child process's end


def main(fd: int) -> None:
    """Serve the worker at the other end of this socket until it closes it."""
    # the worker gets the signal too, and closes the socket when it is time
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent_to_all, lambda *_: None)
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    threading.Thread(target=_die_with_the_worker, args=(fd,), daemon=True).start()
    source = sock.makefile("rb")
    cfg = msgspec.msgpack.decode(read(source), type=WorkerConfig)
    logs.configure("worker", f"engine-{cfg.replica}-{os.getpid()}")
    try:
        engine, tokenizer = make(cfg)
    except ConfigError as error:
        _write(sock, Unfit(str(error)))
        return
    try:
        # A profile that the operator names counts; without one the engine is measured.
        fitted = None if cfg.profile or not cfg.profile_s else fit_engine(engine, cfg.profile_s)
        steps = StepRunner(engine, tokenizer)
        gc.collect()
        # a model is a million objects: a full collection would walk them in the middle of a step
        gc.freeze()
        _write(sock, Ready(engine.facts, fitted))
        while message := read(source):
            asked = _decode_ask(message)
            if asked is None:
                steps.reset()
                _write(sock, Ran([], 0.0))
            elif isinstance(asked, Step):
                _write(sock, steps.run(asked))
            else:
                _write(sock, steps.kv.run(asked))
    except Exception:
        # the worker learns it now: a broken engine may take long to close
        sock.shutdown(socket.SHUT_WR)
        raise
    finally:
        engine.close()


def _write(sock: socket.socket, message: Ready | Unfit | Ran | KvAnswer) -> None:
    sock.sendall(framed(_encode(message)))


def _die_with_the_worker(fd: int) -> None:
    """End with the worker even if it was killed: the next engine needs the GPU's memory."""
    gone = select.poll()
    gone.register(fd, 0)
    gone.poll()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
