"""The prefix cache of a virtual worker: who begins with what others computed, with the books that
the simulated engine has (shared/core/prefixes/cache.py).
"""

import numpy as np

from loadgen.simulator.iteration.running import Found
from shared.columns import Indices, Ints
from shared.core.prefixes.cache import Entry, Kept, PrefixCache
from shared.policy.seam import Bools
from shared.prefix import CHAIN_TOKENS, IS_PLACE, Chain, Changed
from shared.schemas import Announce, Record
from shared.vocabulary import RequestKey


class Prefixes:
    """Columns are indexed by slot. `computed` is the worker's, and grows here by what is found."""

    def __init__(self, announce: Announce, computed: Ints) -> None:
        self._kv_blocks, self._block_tokens = announce.kv_blocks, announce.block_tokens
        self._computed = computed
        blocks = announce.kv_blocks, announce.block_tokens, announce.host_kv_blocks
        self._cache, self._kv_load_s = PrefixCache(*blocks), announce.kv_load_s
        self._kept: dict[int, Kept] = {}  # of the requests whose text is known by a chain
        self._leaving: list[Kept] = []  # an engine forgets requests before its next iteration
        # what must be computed before its next token is not all in the books
        self._unnamed: Bools = np.zeros(len(computed), dtype=np.bool_)
        # the requests that go on elsewhere, by slot, with the hashes computed at the last look, and
        # those that have left since then
        self._bound: dict[int, tuple[RequestKey, int]] = {}
        self._left: list[tuple[RequestKey, int]] = []
        self._saved: dict[int, int] = {}  # tokens found when a prompt was first computed
        self._top = 0  # no slot from here on was ever used

    @property
    def any(self) -> bool:
        """Some request has a chain, or something of one is kept."""
        return bool(self._kept) or not self._cache.empty

    @property
    def shared_blocks(self) -> int:
        return self._cache.shared

    def bring_in(self, chain: Chain, now_s: float) -> int:
        """The KV of these hashes has come from another replica. Returns the tokens of the chain
        that are here now.
        """
        places = {block for n, block in enumerate(chain, 1) if n in IS_PLACE}
        self._cache.bring_in(chain, places, self._free_blocks, now_s)
        return CHAIN_TOKENS * self._cache.match(chain)

    def match(self, chain: Chain) -> int:
        """The hashes of the chain whose KV is here, from the first on."""
        return self._cache.match(chain)

    def leaving(self, slots: Indices) -> bool:
        """Some of these slots have a request that goes on elsewhere."""
        return bool(self._bound) and not self._bound.keys().isdisjoint(slots.tolist())

    def computed(self) -> list[tuple[RequestKey, int]]:
        """The requests that go on elsewhere and of which more is computed than at the last call,
        each with the hashes of it that are.
        """
        found, self._left = self._left, []
        for slot, (key, told) in self._bound.items():
            if (hashes := self._kept[slot].named) > told:
                self._bound[slot] = key, hashes
                found.append((key, hashes))
        return found

    def hold(self, slot: int, chain: Chain, record: Record, keep_s: float) -> None:
        self._top, resume = max(self._top, slot + 1), record.resume
        if record.then is not None and chain:
            self._bound[slot] = record.key, 0
        if resume.begun:
            self._saved[slot] = resume.cached_tokens
        if chain:
            self._kept[slot], self._unnamed[slot] = Kept(chain, keep_s), True

    def clear(self, slot: int, now_s: float) -> None:
        """The slot's KV is free. What is known of it stays until its room is needed."""
        kept = self._kept.get(slot)
        if kept is not None:
            self._cache.name(kept, int(self._computed[slot]))
            self._cache.release(kept, now_s)
            self._unnamed[slot] = True
        self._computed[slot] = 0

    def leave(self, slot: int) -> int:
        """The request is over; its KV is free before the next iteration. Returns how much of its
        prompt was found when that was first computed.
        """
        bound, kept = self._bound.pop(slot, None), self._kept.pop(slot, None)
        if kept is not None:
            self._cache.name(kept, int(self._computed[slot]))
            if bound is not None:
                self._left.append((bound[0], kept.named))
            self._leaving.append(kept)
            self._unnamed[slot] = False
        self._computed[slot] = 0
        return self._saved.pop(slot, 0)

    def forget(self, now_s: float) -> None:
        """Those that are over leave their blocks."""
        for kept in self._leaving:
            self._cache.release(kept, now_s)
        self._leaving.clear()

    def find(self, slots: Indices, known: Ints, asked: Ints) -> Found | None:
        """Lets the entries of a plan, of `asked` tokens each, begin with what the cache has of
        them. None: nothing is found, and all have room.
        """
        cache, has = self._cache, self._computed[slots]
        tops = has + asked
        more = int((self._blocks(tops) - self._blocks(has)).sum())
        free = self._free_blocks
        begins = (has == 0) & self._unnamed[slots]
        if more <= free and not np.count_nonzero(begins):
            cache.fit(free - more)
            return None

        def entries() -> list[Entry]:
            columns = (each.tolist() for each in (slots, self._computed[slots], known, asked))
            return [
                Entry(self._kept.get(slot), *rest) for slot, *rest in zip(*columns, strict=True)
            ]

        cached = np.array(cache.find(entries(), free), dtype=np.int32)
        self._computed[slots] += cached
        runs = np.array(cache.fill(entries(), self._free_blocks), dtype=np.bool_)
        begun = begins & (runs | (cached > 0))
        for slot, tokens in zip(slots[begun].tolist(), cached[begun].tolist(), strict=True):
            self._saved.setdefault(slot, tokens)
        if not cached.any() and runs.all():
            return None
        return Found(slots, runs, cached, self._kv_load_s * cache.loaded_tokens)

    def name(self, slots: Indices, decoding: Bools) -> None:
        """Others may find what these have computed. The output of one that is `decoding`, by
        slot, is written down when it leaves: until then nobody asks for it.
        """
        for slot in slots[self._unnamed[slots]].tolist():
            self._cache.name(self._kept[slot], int(self._computed[slot]))
            self._unnamed[slot] = not decoding[slot]

    def changes(self) -> Changed:
        """Where prefixes are since the last call."""
        return self._cache.changes.take()

    @property
    def _free_blocks(self) -> int:
        """The blocks that no request holds, idle ones of the cache among them."""
        held = int(self._blocks(self._computed[: self._top]).sum())
        return self._kv_blocks - held + self._cache.shared

    def _blocks(self, tokens: Ints) -> Ints:
        blocks: Ints = -(-tokens // self._block_tokens)
        return blocks

    def check(self, peak: Ints) -> None:
        """Raises AssertionError unless the books balance, and `peak` tokens of each slot fit."""
        room = self._kv_blocks + self._cache.shared
        assert int(self._blocks(peak).sum()) <= room, "KV beyond capacity"
        self._cache.check([*self._kept.values(), *self._leaving])
