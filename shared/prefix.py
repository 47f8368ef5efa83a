"""Prefixes: the part of a text that others begin with, and the books of a cache of it.

The chain of a text has a hash for each full block of CHAIN_TOKENS tokens; hash i covers all tokens
to the end of block i. So two texts begin alike for as many blocks as their chains do. The hash is
blake2b, cut to 8 bytes, so no client can make its text pass for another's.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

CHAIN_TOKENS = 64
_BYTES = 8
_PART = struct.Struct("<qqq")

Chain = Sequence[int]


class Piece(NamedTuple):
    """A stretch of a text whose tokens nobody knows: equal ids stand for equal tokens."""

    id: int
    tokens: int


def chain_of(tokens: Sequence[int], salt: bytes = b"") -> tuple[int, ...]:
    """The chain of these tokens. Texts with different salts have nothing in common."""
    chain: list[int] = []
    extend(chain, tokens, salt)
    return tuple(chain)


def extend(chain: list[int], tokens: Sequence[int], salt: bytes = b"") -> None:
    """Add what the chain of these tokens lacks; they begin with those that it covers."""
    done, full = len(chain), len(tokens) // CHAIN_TOKENS
    if done == full:
        return
    own = np.array(tokens[done * CHAIN_TOKENS : full * CHAIN_TOKENS], dtype="<i8").tobytes()
    size, before = 8 * CHAIN_TOKENS, _before(chain, salt)
    for at in range(0, len(own), size):
        before = _digest(before + own[at : at + size])
        chain.append(int.from_bytes(before, "little"))


def chain_of_pieces(pieces: Iterable[Piece], salt: bytes = b"") -> tuple[int, ...]:
    """The chain of a text that is known by its pieces."""
    chain: list[int] = []
    before, own, room = _before(chain, salt), b"", CHAIN_TOKENS
    for piece, tokens in pieces:
        at = 0
        while at < tokens:
            taken = min(room, tokens - at)
            own += _PART.pack(piece, at, taken)
            at += taken
            room -= taken
            if not room:
                before = _digest(before + own)
                chain.append(int.from_bytes(before, "little"))
                own, room = b"", CHAIN_TOKENS
    return tuple(chain)


def pieces_of_ids(ids: Sequence[int], id_tokens: int, prompt_tokens: int) -> tuple[Piece, ...]:
    """The pieces of a prompt whose blocks of `id_tokens` tokens have these ids, as traces tell
    them. The last block may be cut short.
    """
    return tuple(
        Piece(block, min(id_tokens, prompt_tokens - at))
        for block, at in zip(ids, range(0, prompt_tokens, id_tokens), strict=False)
    )


def chain_of_ids(
    ids: Sequence[int], id_tokens: int, prompt_tokens: int, salt: bytes = b""
) -> tuple[int, ...]:
    return chain_of_pieces(pieces_of_ids(ids, id_tokens, prompt_tokens), salt)


def _before(chain: Chain, salt: bytes) -> bytes:
    return chain[-1].to_bytes(_BYTES, "little") if chain else _digest(salt)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_BYTES).digest()


class Kept:
    """One request's part of a cache: the chain of its text, and the blocks that it owns there."""

    __slots__ = ("chain", "named", "owned")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.named = 0  # blocks of the chain that are in the cache, or another's copy of them is
        self.owned: list[int] = []  # in order


class PrefixCache:
    """The blocks of texts whose KV is known by a hash, and their owners. A block outlives its
    owners: then it is idle, may be found again, and gives way when its room is needed: that which
    was left longest ago first, the end of a text before its beginning.

    At most `capacity_blocks` are idle, and fewer where `fit` is told so.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._owners: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.shared = 0  # the sum of all owners beyond the first of each block

    def __len__(self) -> int:
        return len(self._owners)

    def match(self, chain: Chain) -> int:
        """The number of blocks that are here, from the first on until one is missing."""
        owners = self._owners
        for found, block in enumerate(chain):
            if block not in owners:
                return found
        return len(chain)

    def idle(self, chain: Chain) -> int:
        """The number of these blocks that nobody owns."""
        return sum(block in self._idle for block in chain)

    def take(self, kept: Kept, blocks: int) -> None:
        """The request, which owns nothing, begins with so many blocks, which `match` found."""
        for block in kept.chain[:blocks]:
            self._idle.pop(block, None)
            owners = self._owners[block] + 1
            self._owners[block] = owners
            self.shared += owners > 1
            kept.owned.append(block)
        kept.named = blocks

    def name(self, kept: Kept, computed_tokens: int) -> None:
        """The KV of so many tokens of the request is final: their blocks may be found. A block that
        is here already stays, and this copy of it is nobody else's.
        """
        full = min(computed_tokens // CHAIN_TOKENS, len(kept.chain))
        for block in kept.chain[kept.named : full]:
            if block not in self._owners:
                self._owners[block] = 1
                kept.owned.append(block)
        kept.named = max(kept.named, full)

    def release(self, kept: Kept) -> None:
        """The request leaves its blocks, the end of its text first."""
        for block in reversed(kept.owned):
            owners = self._owners[block] - 1
            self._owners[block] = owners
            if owners:
                self.shared -= 1
            else:
                self._idle[block] = None
        kept.owned.clear()
        kept.named = 0
        self.fit(self._capacity_blocks)

    def fit(self, room_blocks: int) -> None:
        """At most so many idle blocks stay."""
        while len(self._idle) > room_blocks:
            del self._owners[self._idle.popitem(last=False)[0]]

    def clear(self) -> None:
        self._owners.clear()
        self._idle.clear()
        self.shared = 0

    def check(self, all_kept: Iterable[Kept]) -> None:
        """Raises AssertionError unless these own all that is owned."""
        owners: dict[int, int] = dict.fromkeys(self._idle, 0)
        for kept in all_kept:
            for block in kept.owned:
                owners[block] = owners.get(block, 0) + 1
        assert owners == self._owners, "a block has lost its owner"
        assert self.shared == sum(max(0, count - 1) for count in owners.values())
        assert len(self._idle) <= self._capacity_blocks
