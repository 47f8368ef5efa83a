"""The beginnings of a prompt, by which replicas that have computed one of them are found.

A prompt's *prefix* is a list of hashes, each of all tokens before a position. Positions lie a block
apart up to `DENSE` blocks, then twice as far apart at each doubling: so the prefix of a long prompt
stays short, and what is found of it falls short by at most a part in DENSE / 2.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from shared.columns import Ints

BLOCK_TOKENS = 64
DENSE = 64  # blocks with a hash each
LIMIT = 1 << 15  # blocks: two million tokens; nothing beyond them has a hash
_BYTES = 8


def _places() -> Ints:
    places = list(range(1, DENSE + 1))
    while places[-1] < LIMIT:
        last = places[-1]
        places += range(last + 2 * last // DENSE, 2 * last + 1, 2 * last // DENSE)
    return np.array(places, dtype=np.int32)


PLACES = _places()  # in blocks, of each hash
TOKENS: list[int] = (PLACES * BLOCK_TOKENS).tolist()  # before each hash


def length_of(prompt_tokens: int) -> int:
    """The number of hashes of a prompt."""
    return int(np.searchsorted(PLACES, prompt_tokens // BLOCK_TOKENS, side="right"))


def prefix_of(tokens: Sequence[int], salt: str) -> bytes:
    """The prefix of a prompt. Prompts of different salts have nothing in common. The hash is
    cryptographic, so that no client can make its text pass for another's.
    """
    raw = np.array(tokens, dtype="<i8")
    seen = hashlib.blake2b(salt.encode(), digest_size=_BYTES)
    hashes, before = list[bytes](), 0
    for end in TOKENS[: length_of(len(tokens))]:
        seen.update(raw[before:end].tobytes())
        hashes.append(seen.copy().digest())
        before = end
    return b"".join(hashes)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()


def hashes_of(prefix: bytes) -> list[int]:
    """The hashes of a prefix, or of any column of them; an odd rest is none."""
    hashes: list[int] = np.frombuffer(prefix, dtype="<u8", count=len(prefix) // _BYTES).tolist()
    return hashes
