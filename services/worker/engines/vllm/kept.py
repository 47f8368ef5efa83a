"""Follows which prefixes vLLM's cache keeps, by the events of its block pool. These tell a block by
a part of its name; a prefix (shared/prefix.py) is kept as long as the block that it ends with.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from services.worker.engine import KvName
from shared.prefix import CHAIN_TOKENS, PLACES, Chain, Changed, Changes, Where


class _Came(NamedTuple):
    """Beside vLLM's events: blocks that another replica computed."""

    names: Sequence[KvName]


class KeptInVllm:
    """The index of the prompts that were loaded. `block_tokens`: of one block of the pool."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # vLLM's scheduler takes the events after each step, for a publisher of its own
        self._take, self._events = pool.take_events, list[Any]()
        pool.enable_kv_cache_events = True
        pool.take_events = self._note
        self._asked: dict[Any, tuple[int, int]] = {}  # by vLLM's hash: ours, and requests that wait
        self._kept: dict[Any, int] = {}  # by vLLM's hash: ours

    def ask(self, block_hashes: Sequence[Any], chain: Chain) -> list[Any]:
        """A request was loaded, whose full blocks have these hashes. Returns those to `leave`."""
        asked = []
        for place in PLACES:
            blocks, rest = divmod(place * CHAIN_TOKENS, self._block_tokens)
            if place > len(chain) or blocks > len(block_hashes):
                break
            if not rest:
                name = maybe_convert_block_hash(block_hashes[blocks - 1])
                _, requests = self._asked.get(name, (0, 0))
                self._asked[name] = chain[place - 1], requests + 1
                asked.append(name)
        return asked

    def leave(self, asked: Sequence[Any]) -> None:
        """That request is released."""
        for name in asked:
            ours, requests = self._asked.pop(name)
            if requests > 1:
                self._asked[name] = ours, requests - 1

    def came(self, names: Sequence[KvName]) -> None:
        """The pool knows these blocks now, too."""
        self._note()
        self._events.append(_Came(names))

    def _note(self) -> list[Any]:
        events: list[Any] = self._take()
        self._events += events
        return events

    def changes(self) -> Changed:
        """Where the prefixes are that have come and gone since the last call."""
        self._note()
        events, self._events = self._events, []
        changes = Changes()
        for event in events:
            if isinstance(event, _Came):
                for digest, mark in event.names:
                    if mark is not None:
                        self._kept[maybe_convert_block_hash(digest)] = mark
                        changes.note(mark, Where.GPU)
                continue
            stored = hasattr(event, "parent_block_hash")
            for name in getattr(event, "block_hashes", list(self._kept)):  # without: all are gone
                if stored and name in self._asked:
                    self._kept[name] = self._asked[name][0]
                    changes.note(self._kept[name], Where.GPU)
                elif not stored and name in self._kept:
                    changes.note(self._kept.pop(name), Where.NOWHERE)
        return changes.take()
