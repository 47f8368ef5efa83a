"""The books of a prefix cache, as the simulated engine and the virtual worker keep them. They are
those of the torch engine (services/worker/engines/torch/paged.py), in blocks of 64 tokens.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from shared.core.prefixes.idle import Idle
from shared.prefix import CHAIN_TOKENS, IS_PLACE, Chain, Changes, Where


class Kept:
    """One request's part of a cache: the chain of its text, and the blocks that it owns there."""

    __slots__ = ("chain", "keep_s", "named", "owned")

    def __init__(self, chain: Chain, keep_s: float = 0.0) -> None:
        self.chain, self.keep_s = list(chain), keep_s
        self.named = 0  # blocks of the chain that are in the cache, or another's copy of them is
        self.owned: list[int] = []  # in order


class PrefixCache:
    """The books of an engine's prefix cache, by hash: the blocks of its KV whose text is known, and
    their owners. A block outlives its owners: then it is idle, may be found again, and gives way
    when its room is needed: in the order of Idle, the end of a text before its beginning. What
    gives way goes to the host's memory, where that which came longest ago gives way, and comes back
    when a request begins with it. Each block is in one place.

    All counts are KV blocks of `block_tokens`, several to a hash. At most `capacity_blocks` are
    idle, and fewer where `fit` is told so. The host has room for `host_blocks`.
    """

    def __init__(
        self, capacity_blocks: int, block_tokens: int = CHAIN_TOKENS, host_blocks: int = 0
    ) -> None:
        assert CHAIN_TOKENS % block_tokens == 0, "a hash covers whole blocks"
        self._capacity_blocks = capacity_blocks
        self._block_tokens, self._each = block_tokens, CHAIN_TOKENS // block_tokens
        self._owners: dict[int, int] = {}  # by hash
        self._idle = Idle()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._host_most = host_blocks // self._each  # hashes
        self.loaded_tokens = 0  # that the iteration has brought back from the host
        self.shared = 0  # blocks that are saved: the sum of all owners beyond the first of each
        self.changes = Changes()
        self._places: set[int] = set()  # the known hashes of prefixes

    @property
    def empty(self) -> bool:
        return not (self._owners or self._host)

    def match(self, chain: Chain) -> int:
        """The number of hashes that are known, from the first on until one is not."""
        owners, host = self._owners, self._host
        for found, block in enumerate(chain):
            if block not in owners and block not in host:
                return found
        return len(chain)

    def claims(self, chain: Chain) -> int:
        """The free blocks that a request takes which begins with these hashes: idle ones, and those
        for what comes back from the host.
        """
        return self._each * sum(block in self._idle or block in self._host for block in chain)

    def take(self, kept: Kept, hashes: int) -> None:
        """The request, which owns nothing, begins with so many hashes, which `match` found."""
        for block in kept.chain[:hashes]:
            self._idle.discard(block)
            owners = self._owners.get(block, 0) + 1
            if block in self._host:
                self._come_back(block)
                self.loaded_tokens += CHAIN_TOKENS
            self._owners[block] = owners
            self.shared += self._each if owners > 1 else 0
            kept.owned.append(block)
        kept.named = hashes

    def name(self, kept: Kept, computed_tokens: int) -> None:
        """The KV of so many tokens of the request is final: it may be found. A hash that is known
        already keeps its blocks, and this copy of them is nobody else's.
        """
        full = min(computed_tokens // CHAIN_TOKENS, len(kept.chain))
        for number, block in enumerate(kept.chain[kept.named : full], kept.named + 1):
            if block not in self._owners:
                self._owners[block] = 1
                kept.owned.append(block)
                if block in self._host:  # it began where there was no room for that
                    self._come_back(block)
                elif number in IS_PLACE:
                    self._places.add(block)
                    self.changes.note(block, Where.GPU)
        kept.named = max(kept.named, full)

    def release(self, kept: Kept, now_s: float = 0.0) -> None:
        """The request leaves its blocks, the end of its text first. Time never goes back."""
        for block in reversed(kept.owned):
            owners = self._owners[block] - 1
            self._owners[block] = owners
            if owners:
                self.shared -= self._each
            else:
                self._idle.add(block, now_s, kept.keep_s)
        kept.owned.clear()
        kept.named = 0
        self.fit(self._capacity_blocks)

    def fit(self, room_blocks: int) -> None:
        """At most so many idle blocks stay."""
        most = max(room_blocks, 0) // self._each
        while len(self._idle) > most:
            block = self._idle.pop()
            del self._owners[block]
            self._host[block] = None
            self._note(block, Where.HOST)
            if len(self._host) > self._host_most:
                gone = self._host.popitem(last=False)[0]
                self._note(gone, Where.NOWHERE)
                self._places.discard(gone)

    def forget(self) -> None:
        """Nothing is known any more, as nobody owns anything, and nothing is told of it."""
        assert len(self._owners) == len(self._idle), "a block has an owner"
        for blocks in (self._owners, self._idle, self._host, self._places):
            blocks.clear()
        self.changes.take()

    def _come_back(self, block: int) -> None:
        del self._host[block]
        self._note(block, Where.GPU)

    def _note(self, block: int, where: Where) -> None:
        if block in self._places:
            self.changes.note(block, where)

    # ------------------------------------------------------------ KV that moves

    def lacking(self, chain: Chain, free_blocks: int, now_s: float = 0.0) -> tuple[int, list[int]]:
        """The number of a text's hashes that are known from the first on, and those of the rest
        that are not, as far as free blocks go beyond the known ones. These become the newest.
        """
        known = [block for block in chain if block in self._owners]
        for block in reversed(known):
            self._idle.renew(block, now_s)
        found = self.match(chain)
        room = free_blocks - self.claims(list({*known, *chain[:found]}))
        away = [
            each for each in chain[found:] if each not in self._owners and each not in self._host
        ]
        return found, away[: max(room, 0) // self._each]

    def has(self, block: int) -> bool:
        return block in self._owners or block in self._host

    def bring_in(
        self, blocks: Sequence[int], places: Collection[int], free_blocks: int, now_s: float = 0.0
    ) -> list[bool]:
        """Makes these known and idle, where free blocks go that far; true: it is known now.
        `places`: those of them that are hashes of prefixes.
        """
        new = [each for each in dict.fromkeys(blocks) if not self.has(each)]
        most = min(free_blocks, self._capacity_blocks) // self._each
        new = new[: max(most, 0)]
        self.fit(min(free_blocks, self._capacity_blocks) - len(new) * self._each)
        for block in reversed(new):
            self._owners[block] = 0
            self._idle.add(block, now_s, 0.0)
            if block in places:
                self._places.add(block)
                self.changes.note(block, Where.GPU)
        return [self.has(each) for each in blocks]

    # ------------------------------------------------------------ an iteration

    def find(self, entries: Sequence["Entry"], free_blocks: int) -> list[int]:
        """Lets the entries of an iteration that begin share what others computed. Returns the
        positions that each found. It is done only where all entries still have room: idle blocks,
        which count among the free ones, are free no more once they are shared.
        """
        self.loaded_tokens = 0
        spare = free_blocks - sum(
            self._blocks(each.computed + each.tokens) - self._blocks(each.computed)
            for each in entries
        )
        cached = [0] * len(entries)
        for n, (kept, computed, known, tokens) in enumerate(entries):
            if kept is None or computed:
                continue
            # at least one token is left to compute
            found = self.match(kept.chain[: (known - 1) // CHAIN_TOKENS])
            claims = self.claims(kept.chain[:found])
            if not found or claims > max(spare, 0):
                continue
            self.take(kept, found)
            cached[n] = has = found * CHAIN_TOKENS
            new = self._blocks(has + min(tokens, known - has)) - self._blocks(has)
            spare += self._blocks(tokens) - new - claims
        return cached

    def fill(self, entries: Sequence["Entry"], free_blocks: int) -> list[bool]:
        """Makes room for these entries, in order, and says which of them have any. Blocks that were
        found may have been promised to a plan in flight, whose entries may then have none.
        """
        runs = []
        for _, computed, known, tokens in entries:
            left = known - computed
            new = computed + (min(tokens, left) if left > 1 else tokens)
            more = self._blocks(new) - self._blocks(computed)
            runs.append(more <= free_blocks)
            free_blocks -= more if runs[-1] else 0
        self.fit(free_blocks)
        return runs

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def check(self, all_kept: Iterable[Kept]) -> None:
        """Raises AssertionError unless these own all that is owned."""
        owners: dict[int, int] = dict.fromkeys(self._idle, 0)
        for kept in all_kept:
            for block in kept.owned:
                owners[block] = owners.get(block, 0) + 1
        assert owners == self._owners, "a block has lost its owner"
        assert self.shared == self._each * sum(max(0, count - 1) for count in owners.values())
        assert len(self._idle) * self._each <= self._capacity_blocks
        assert len(self._host) <= self._host_most
        assert self._host.keys().isdisjoint(self._owners), "a block in two places"
        assert self._places <= self._host.keys() | self._owners.keys()


class Entry(NamedTuple):
    """One entry of an iteration: it may compute `tokens` more of the `known` tokens of its text,
    of which `computed` are. More than are left only where it drafts. `kept` None: nothing of it is
    known.
    """

    kept: Kept | None
    computed: int
    known: int
    tokens: int
