"""Compiles formats of structured output on trial, before a worker takes their request in.

A schema of 100 bytes can take hours and all memory. So a process beside the engine forks for each
format, and the copy compiles it and begins to write by it. The kernel ends a copy that takes more
CPU time or memory than any usual format. The engine's own compilation takes no longer than the
copy's did. `python -m services.worker.grammar_trial FD` is the other end.
"""

import asyncio
import hashlib
import os
import resource
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import structlog

from services.worker.line import Line, framed, read
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured

log = structlog.get_logger()

# CPU time of a trial. With llguidance usual formats take 5 ms, and 400 properties of an object
# 60 ms; with xgrammar and a vocabulary of 128,000 tokens 50 ms, and 100 optional properties 3.5 s.
# Both engines compile beside their own thread.
CPU_S = {"llguidance": 0.15, "xgrammar": 5.0}
BUSY = 20.0  # the longest time of a trial over its CPU time, on a machine with other work
MEMORY_BYTES = 512 << 20  # beyond what the process has; usual formats take 20 MB
# The longest that a hold waits. The planner gives it up after a second (hold_timeout_s).
ANSWERED_WITHIN_S = 0.7
TRIALS_AT_ONCE = 16  # asked and not answered: at 5 ms each 80 ms, at CPU_S 2.4 s
REMEMBERED = 1024  # formats, with their answers of at most 1 KB
SHOWN_CHARACTERS = 1000
STEPS = 16  # tokens written by a format

Try = Callable[[Structured], str]


class What(msgspec.Struct, frozen=True):
    """The compiler of an engine."""

    compiler: str  # a key of CPU_S
    folder: str  # of the model
    vocabulary: int
    ends: list[int]


class Tried(msgspec.Struct, frozen=True):
    """`refused`: why the format is never taken; empty if it is. `late`: the trial did not end."""

    refused: str = ""
    late: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_what = msgspec.msgpack.Decoder(What).decode
_decode_wanted: Callable[[bytes], Structured] = msgspec.msgpack.Decoder(Structured).decode
_decode_tried = msgspec.msgpack.Decoder(Tried).decode


class GrammarTrial:
    """The worker's end of the socket. The process begins with `start`, and again if it ended."""

    def __init__(self, what: What) -> None:
        self._what = what
        self._line: Line | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._answers: OrderedDict[bytes, asyncio.Task[Tried]] = OrderedDict()
        self._waiting = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        await self._end()
        self._sock, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", "services.worker.grammar_trial", str(theirs.fileno()))
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(theirs.fileno(),)
            )
        self._line = Line(self._sock)
        await self._line.ask(_encode(self._what))

    async def close(self) -> None:
        for task in (*self._answers.values(), self._starting):
            if task is not None:
                task.cancel()
        await self._end()

    async def _end(self) -> None:
        line, self._line = self._line, None
        process, self._process = self._process, None
        if line is not None:
            line.close()
            self._sock.close()
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def refusal(self, wanted: Structured) -> str:
        """Why the format is never taken; empty if it is. Raises TimeoutError if that is unknown."""
        message = _encode(wanted)
        key = hashlib.blake2b(message, digest_size=16).digest()
        answer = self._answers.get(key)
        if answer is None:
            if self._waiting >= TRIALS_AT_ONCE:
                raise TimeoutError("too many formats of output are to be compiled")
            self._waiting += 1
            answer = self._answers[key] = asyncio.ensure_future(self._ask(key, message))
        self._answers.move_to_end(key)
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        done, _ = await asyncio.wait((answer,), timeout=ANSWERED_WITHIN_S)
        if not done or answer.cancelled() or (tried := answer.result()).late:
            raise TimeoutError("the format of its output could not be compiled in time")
        return tried.refused

    async def _ask(self, key: bytes, message: bytes) -> Tried:
        try:
            assert self._starting is not None, "start comes first"
            await self._starting
            assert self._line is not None
            tried = _decode_tried(await self._line.ask(message))
        except (EOFError, OSError):
            log.error("grammar_trial.ended")
            self.start()
            tried = Tried(late=True)
        finally:
            self._waiting -= 1
        if tried.late:
            self._answers.pop(key, None)
        return tried


# ---------------------------------------------------------------- the child process's end


def main(fd: int) -> None:
    """Serve the worker at the other end of this socket until it closes it."""
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent_to_all, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    source = sock.makefile("rb")
    what = _decode_what(read(source))
    tries = _xgrammar(what) if what.compiler == "xgrammar" else _llguidance(what)
    sock.sendall(framed(_encode(Tried())))
    while message := read(source):
        sock.sendall(framed(_encode(tried(tries, message, CPU_S[what.compiler]))))


def tried(tries: Try, message: bytes, cpu_s: float) -> Tried:
    """The answer of a copy of this process, or how the kernel ended it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _limit(cpu_s)
            words = tries(_decode_wanted(message))[:SHOWN_CHARACTERS]
            os.write(writing, words.encode(errors="replace"))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        words = answer.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return Tried(words)
    if status == -signal.SIGALRM:
        return Tried(late=True)
    too_long = status == -signal.SIGPROF
    spent = f"{cpu_s:g} s" if too_long else f"{MEMORY_BYTES >> 20} MB, or all stack"
    return Tried(f"the format cannot be compiled: it is too complex (it takes more than {spent})")


def _limit(cpu_s: float) -> None:
    """The kernel ends this process at its deadline, and where it takes too much."""
    signal.setitimer(signal.ITIMER_REAL, BUSY * cpu_s)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack, most = resource.getrlimit(resource.RLIMIT_STACK)
    if stack != resource.RLIM_INFINITY:  # the engine's own is deeper
        resource.setrlimit(resource.RLIMIT_STACK, (stack // 2, most))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _llguidance(what: What) -> Try:
    from services.worker.engines.grammars import Grammars, failure

    grammars, ends = Grammars(Path(what.folder), what.vocabulary, what.ends), set(what.ends)

    def tries(wanted: Structured) -> str:
        matcher = grammars.compile(wanted)
        if isinstance(matcher, str):
            return matcher
        mask = matcher.compute_bitmask()
        refused, rng = failure(matcher), Random(0)
        for _ in range(STEPS):  # the lexer is made as it is needed
            token = _allowed(mask, rng)
            if token is None or token in ends or not matcher.consume_token(token):
                break
            mask = matcher.compute_bitmask()
        return refused

    return tries


def _xgrammar(what: What) -> Try:
    """A trial by vLLM's default compiler. vLLM checks the format; here only limits are tried."""
    import torch  # noqa: F401
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(what.folder)
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=what.vocabulary),
        max_threads=1,
        cache_enabled=False,
    )

    def compiled(wanted: Structured) -> Any:
        match wanted:
            case JsonSchema(schema=schema):
                return compiler.compile_json_schema(schema)
            case JsonObject():
                return compiler.compile_builtin_json_grammar()
            case Regex(pattern=pattern):
                return compiler.compile_regex(pattern)
            case Choice(options=options):
                choices = " | ".join(msgspec.json.encode(option).decode() for option in options)
                return compiler.compile_grammar(f"root ::= {choices}")
            case Grammar(ebnf=ebnf):
                if "::=" in ebnf or not hasattr(compiler, "compile_lark"):
                    return compiler.compile_grammar(ebnf)
                return compiler.compile_lark(ebnf)

    def tries(wanted: Structured) -> str:
        try:
            matcher = xgrammar.GrammarMatcher(compiled(wanted))
            mask = xgrammar.allocate_token_bitmask(1, what.vocabulary)
            rng = Random(0)
            for _ in range(STEPS):
                matcher.fill_next_token_bitmask(mask)
                token = _allowed(mask.numpy().tobytes(), rng)
                if token is None or token in what.ends or not matcher.accept_token(token):
                    break
        except MemoryError:
            raise
        except Exception:
            return ""
        return ""

    return tries


def _allowed(mask: bytes, rng: Random) -> int | None:
    """A token of a mask, which has one bit for each; None if there is none."""
    begin = rng.randrange(len(mask))
    for n in (*range(begin, len(mask)), *range(begin)):
        if mask[n]:
            token: int = 8 * n + rng.choice([bit for bit in range(8) if mask[n] >> bit & 1])
            return token
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
