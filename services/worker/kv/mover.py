"""KV that moves between workers: gives what its engine has, fetches what it lacks."""

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from services.worker.config import WorkerConfig
from services.worker.engines.shelf import Shelf
from services.worker.kv.incoming import Fetching, Here
from services.worker.kv.link import Link
from services.worker.kv.outgoing import Pump
from services.worker.kv.server import KvServer
from services.worker.kv.turns import EngineTurns, Rows
from services.worker.kv.wire import MOST_OF_A_MESSAGE, Ask, Blocks, End, Go, Welcome, connect
from services.worker.runner import Runner
from shared.errors import ConfigError, EngineError, PeerError

log = structlog.get_logger()

MOST_AHEAD = 64  # texts that come while they are computed elsewhere
MOST_FETCHES = 32  # at once, those aside
AHEAD_S = 120.0  # the longest that one is on its way
PROBES, PROBE_BYTES = 3, 16 << 20
EVERY_ADDRESS = {"0.0.0.0", "::", "*"}
PASSIVE = socket.AI_PASSIVE
CLOSE_S = 2.0
SLOWEST_S = 1.0  # for a token, that is told
THREADS = 2  # for digests, and for reading the shelves of others


@dataclass
class _Ahead:
    fetching: Fetching
    task: asyncio.Task[int]


class KvMover:
    """`address`: host:port where others fetch its KV; empty: it does not move. `move_s`: the
    seconds that a token's KV takes to come here; 0: none can.
    """

    def __init__(self, runner: Runner, cfg: WorkerConfig) -> None:
        self._runner, self._cfg = runner, cfg
        self.address = ""
        self._here: Here | None = None
        self._ahead: dict[str, _Ahead] = {}
        self._fetches = asyncio.Semaphore(MOST_FETCHES)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kv")
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: socket.socket | None = None
        self._shelf: Shelf | None = None
        self._pump: Pump | None = None

    @property
    def move_s(self) -> float:
        return 0.0 if self._here is None else min(SLOWEST_S, self._here.link.token_s)

    async def start(self) -> None:
        """Listen, and measure the link. Without memory for it, KV does not move. Raises
        ConfigError for an address that cannot be, or an engine whose KV cannot move.
        """
        if not self._cfg.kv_listen:
            return
        facts = self._runner.facts.kv
        if facts is None:
            raise ConfigError(
                "kv_listen: the KV of this engine does not move; sim engines move theirs with "
                "prefix_caching, and a profile that states kv_bytes_per_token"
            )
        self._listening, address = await _listen(self._cfg.kv_listen)
        try:
            shelf = Shelf(facts.block_bytes)
        except OSError as error:
            log.warning("kv.no_memory", error=str(error))
            return
        half = shelf.rows // 2
        turns = EngineTurns(self._runner, shelf)
        pump = self._pump = Pump(turns, range(half))
        server = KvServer(pump, shelf, facts.layout, self._pool)
        here = Here(
            self._cfg.replica,
            facts,
            turns,
            shelf,
            Rows(range(half, shelf.rows)),
            Link(facts.block_bytes / facts.block_tokens, facts.move_s),
            self._pool,
        )
        self._shelf = shelf
        self._tasks = [
            asyncio.create_task(_while_there_is_an_engine(work), name="worker.kv")
            for work in (pump.run(), server.run(self._listening))
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        try:
            await _probe(here, address)
        except (OSError, TimeoutError, PeerError) as error:
            reason = str(error) or type(error).__name__
            log.warning("kv.not_reached", address=address, error=reason)
            return
        self._here, self.address = here, address
        log.info("kv.moves", address=address, token_s=here.link.token_s)

    async def close(self) -> None:
        """Others fetch nothing more; what is on its way here ends."""
        for ahead in self._ahead.values():
            ahead.task.cancel()
        tasks = [*self._tasks, *(ahead.task for ahead in self._ahead.values())]
        for task in self._tasks:
            task.cancel()
        if tasks:  # an engine that hangs is not waited for
            await asyncio.wait(tasks, timeout=CLOSE_S)
        self._ahead.clear()
        if self._listening is not None:
            self._listening.close()
        if self._shelf is not None:
            self._shelf.close()
        self._pool.shutdown(cancel_futures=True)

    @property
    def at_rest(self) -> bool:
        """True if nothing is on its way: every row of the shelf is free."""
        here, pump = self._here, self._pump
        return here is None or pump is None or pump.free + here.rows.free == here.shelf.rows

    def check(self) -> None:
        """Raises AssertionError unless nothing is lost of the shelf of a mover at rest."""
        assert self.at_rest, "a row of the shelf is lost"

    # ------------------------------------------------------------ fetching

    def ahead(self, key: str, tokens: Sequence[int], salt: bytes, address: str) -> None:
        """Begin to fetch a prompt that is being computed there: each block comes as soon as it is
        computed. Too many at once are left for `fetch`.
        """
        if self._here is None or key in self._ahead or len(self._ahead) >= MOST_AHEAD:
            return
        fetching = Fetching(self._here, address, asyncio.get_running_loop().time() + AHEAD_S)
        # a token more, so that all of the prompt's blocks are wanted
        task = asyncio.create_task(self._run(fetching, [*tokens, 0], salt), name="worker.kv.ahead")
        self._ahead[key] = _Ahead(fetching, task)
        task.add_done_callback(lambda _: self._over(key, task))

    async def fetch(
        self, key: str, tokens: Sequence[int], salt: bytes, address: str, within_s: float
    ) -> int:
        """Fetch what is not here of this text, within so many seconds and a turn of the engine.
        Returns the number of its positions that are here, from the first on. It ends when it is
        cancelled; a peer's fault is never raised.
        """
        if self._here is None:
            return 0
        until_s = asyncio.get_running_loop().time() + within_s
        ahead = self._ahead.pop(key, None)
        if ahead is not None and ahead.fetching.address == address:
            ahead.fetching.until(until_s)
            try:
                there = await ahead.task
            finally:
                ahead.task.cancel()
            full = (len(tokens) - 1) // (size := self._here.facts.block_tokens) * size
            if there >= full:
                return full
        elif ahead is not None:
            ahead.task.cancel()
        fetching = Fetching(self._here, address, until_s)
        fetching.hurry.set()
        try:
            async with asyncio.timeout_at(until_s):
                await self._fetches.acquire()
        except TimeoutError:
            return 0
        try:
            return await self._run(fetching, tokens, salt)
        finally:
            self._fetches.release()

    def forget(self, key: str) -> None:
        """The request has ended: what is on its way for it ends, too."""
        ahead = self._ahead.pop(key, None)
        if ahead is not None:
            ahead.task.cancel()

    async def _run(self, fetching: Fetching, tokens: Sequence[int], salt: bytes) -> int:
        try:
            return await fetching.run(tokens, salt)
        except EngineError:  # the worker ends by its own step
            return 0

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody can fetch its KV any more."""
        self.address = ""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kv.failed", error=repr(error))

    def _over(self, key: str, task: asyncio.Task[int]) -> None:
        ahead = self._ahead.get(key)
        if ahead is not None and ahead.task is task:
            del self._ahead[key]


async def _while_there_is_an_engine(work: Coroutine[Any, Any, None]) -> None:
    with suppress(EngineError):
        await work


async def _listen(where: str) -> tuple[socket.socket, str]:
    """The listening socket, and the address to tell others: where it listens on all addresses, that
    of this host's name. Raises ConfigError.
    """
    host, colon, port = where.rpartition(":")
    host, loop = host.strip("[]"), asyncio.get_running_loop()
    try:
        if not colon:
            raise ValueError("host:port is wanted")
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=PASSIVE)
        family, _, _, _, at = found[0]
        listening = socket.create_server(at[:2], family=family, backlog=128)
    except (OSError, ValueError) as error:
        raise ConfigError(f"kv_listen {where!r}: {error}") from error
    listening.setblocking(False)
    if not host or host in EVERY_ADDRESS:
        named = await loop.getaddrinfo(socket.gethostname(), None, family=family)
        host = str(named[0][4][0])
    bound = listening.getsockname()[1]
    return listening, f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"


async def _probe(here: Here, address: str) -> None:
    """Measure the link by way of the address that others use. The fastest of some rounds counts.
    Raises OSError, TimeoutError, PeerError.
    """
    size, loop = here.facts.block_bytes, asyncio.get_running_loop()
    asked = max(1, min(MOST_OF_A_MESSAGE, PROBE_BYTES // max(size, 1)))
    view, best_s, count = memoryview(bytearray(size)), float("inf"), 0
    for _ in range(PROBES):
        wire = await connect(address)
        try:
            await wire.send(Ask(layout=here.facts.layout, replica=here.replica, probe=asked))
            await wire.read(Welcome)
            began_s = loop.time()
            await wire.send(Go(False))
            blocks: Blocks = await wire.read(Blocks)
            for _ in blocks.numbers:
                await wire.read_into(view)
            await wire.read(End)
            best_s, count = min(best_s, loop.time() - began_s), len(blocks.numbers)
        finally:
            wire.close()
    here.link.came(size * count, best_s)
