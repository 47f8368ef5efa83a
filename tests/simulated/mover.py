"""KV that moves between simulated workers, in virtual time: links may be slow, break off, or end at
a process that is killed or paused.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from services.worker.engine import KvName
from services.worker.engines.sim.engine import SimEngine

PIECE = 4  # blocks that come together
POLL_S = 0.005


class Links:
    """The engines from which KV can be fetched, by address. `breaks`: the part of the pieces with
    which a fetch breaks off.
    """

    def __init__(self, rng: Random, breaks: float = 0.0) -> None:
        self.rng, self.breaks = rng, breaks
        self.moved_tokens = 0
        self._engines: dict[str, tuple[SimEngine, Callable[[], bool]]] = {}

    def open(self, address: str, engine: SimEngine, answers: Callable[[], bool]) -> None:
        """`answers`: the worker there lives and is not paused."""
        self._engines[address] = engine, answers

    def take(self, address: str, names: list[KvName]) -> list[KvName] | None:
        """Those of these blocks that are there now; None: nobody answers."""
        engine, answers = self._engines.get(address, (None, lambda: False))
        if engine is None or not answers() or self.rng.random() < self.breaks:
            return None
        there = engine.take_out([name.digest for name in names], [memoryview(b"")] * len(names))
        return [name for name, has in zip(names, there, strict=True) if has]


class VirtualMover:
    """Implements Mover (services/worker/endpoints/holds.py) for one worker's engine."""

    def __init__(
        self,
        links: Links,
        address: str,
        engine: SimEngine,
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
    ) -> None:
        self.address, self.move_s = address, 1e-6
        self._links, self._engine, self._spawn = links, engine, spawn

    def ahead(self, key: str, tokens: Sequence[int], salt: bytes, address: str) -> None:
        self._spawn(self.fetch(key, tokens, salt, address, 2.0))

    async def fetch(
        self, key: str, tokens: Sequence[int], salt: bytes, address: str, within_s: float
    ) -> int:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while (lacking := self._engine.lacking(tokens, salt)).names and loop.time() < until_s:
            await asyncio.sleep(self._links.rng.expovariate(1 / POLL_S))
            came = self._links.take(address, list(lacking.names[:PIECE]))
            if came is None:
                break
            self._engine.bring_in(came, [memoryview(b"")] * len(came))
            self._links.moved_tokens += 64 * len(came)
        return self._engine.lacking(tokens, salt).tokens

    def forget(self, key: str) -> None:
        """Lets what is on its way come."""
