"""Prefixes: the part of a text that others begin with.

The chain of a text has a hash for each full block of CHAIN_TOKENS tokens; hash i covers all tokens
to the end of block i. So two texts begin alike for as many blocks as their chains do. The hash is
blake2b, cut to 8 bytes, so no client can make its text pass for another's.

Messages carry the *prefix* of a prompt: the hashes of its chain at PLACES, which lie a block apart
up to DENSE blocks, then twice as far apart at each doubling. So the prefix of a long prompt stays
short, and what is found by it falls short by at most a part in DENSE / 2.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

CHAIN_TOKENS = 64
DENSE = 64
LIMIT = 1 << 15  # blocks: two million tokens; those beyond have no place
_BYTES = 8
_PART = struct.Struct("<qqq")

Chain = Sequence[int]  # 8-byte hashes


def _places() -> list[int]:
    places = list(range(1, DENSE + 1))
    while places[-1] < LIMIT:
        step = 2 * places[-1] // DENSE
        places += range(places[-1] + step, 2 * places[-1] + 1, step)
    return places


PLACES = _places()  # the number of blocks before each hash of a prefix
IS_PLACE = frozenset(PLACES)


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


def prefix_of(chain: Chain) -> bytes:
    """The prefix of a prompt by its chain."""
    return pack_hashes([chain[place - 1] for place in PLACES[: bisect_right(PLACES, len(chain))]])


def salt_of(salt: str, adapter: str) -> bytes:
    """The salt of a request's texts: KV depends on its adapter, and tenants may not share it."""
    return f"{salt}\0{adapter}".encode() if salt or adapter else b""


def pack_hashes(hashes: Sequence[int]) -> bytes:
    if not hashes:
        return b""
    return np.array(hashes, dtype="<u8").tobytes()


def hashes_of(prefix: bytes) -> list[int]:
    """The hashes of a prefix, or of another column of them; an odd rest is none."""
    hashes: list[int] = np.frombuffer(prefix, "<u8", len(prefix) // _BYTES).tolist()
    return hashes


def _before(chain: Chain, salt: bytes) -> bytes:
    return chain[-1].to_bytes(_BYTES, "little") if chain else _digest(salt)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_BYTES).digest()


class Where(Enum):
    """The place of the KV behind a hash."""

    GPU = "gpu"
    HOST = "host"  # the memory of the GPU's machine
    NOWHERE = "nowhere"


class Changed(NamedTuple):
    """The hashes of prefixes that are now on the GPU, in the host's memory, and nowhere."""

    kept: Sequence[int] = ()
    moved: Sequence[int] = ()
    dropped: Sequence[int] = ()


UNCHANGED = Changed()


class Changes:
    """Where a cache has the hashes of prefixes that have moved since the changes were taken."""

    def __init__(self) -> None:
        self._where: dict[int, Where] = {}

    @property
    def untold(self) -> frozenset[int]:
        return frozenset(self._where)

    def note(self, prefix: int, where: Where) -> None:
        self._where[prefix] = where

    def take(self) -> Changed:
        if not self._where:
            return UNCHANGED
        lists: dict[Where, list[int]] = {where: [] for where in Where}
        for prefix, where in self._where.items():
            lists[where].append(prefix)
        self._where = {}
        return Changed(*lists.values())
