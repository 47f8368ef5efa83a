"""Prefix caching: a sequence begins with blocks that others computed of the same tokens. A full
block is known by a hash of itself and of the block before, as in vLLM. The hash is cryptographic,
so no client can make its text pass for another's.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from services.worker.engines.torch.paged import Blocks, Place
from shared.prefix import CHAIN_TOKENS, IS_PLACE, extend

_BYTES = 16


class Prefix:
    """The hashes of one text's full blocks, and the number of blocks named by them so far. Texts
    with different salts have no block in common.
    """

    def __init__(self, block_tokens: int, salt: bytes = b"") -> None:
        self._block_tokens, self.salt = block_tokens, salt
        self._hashes: list[bytes] = []
        self._chain: list[int] = []
        self._named = 0

    def begin(self, blocks: Blocks, place: Place, tokens: Sequence[int], spare: int) -> int:
        """Lets an empty `place` begin with known blocks. Returns how many positions they hold; 0
        where that takes more than `spare` free blocks. At least one token is left to compute.
        """
        found = blocks.find(self._of(tokens, len(tokens) - 1))
        if blocks.claims(found) > spare:
            return 0
        blocks.share(place, found)
        self._named = len(found)
        return len(found) * self._block_tokens

    def name(self, blocks: Blocks, place: Place, tokens: Sequence[int], computed: int) -> None:
        """The KV of `computed` tokens in `place` is final: their full blocks may be shared."""
        full = computed // self._block_tokens
        if full == self._named:
            return
        hashes = self._of(tokens, computed)
        for number in range(self._named, full):
            place_blocks, rest = divmod((number + 1) * self._block_tokens, CHAIN_TOKENS)
            if rest or place_blocks not in IS_PLACE:
                blocks.name(place, number, hashes[number])
            else:
                extend(self._chain, tokens[:computed], self.salt)
                blocks.name(place, number, hashes[number], self._chain[place_blocks - 1])
        self._named = full

    def restart(self) -> None:
        """The place is a new one. The text, and its hashes, are the same."""
        self._named = 0

    def _of(self, tokens: Sequence[int], upto: int) -> list[bytes]:
        """The hashes of the full blocks of the first `upto` tokens."""
        size, full = self._block_tokens, upto // self._block_tokens
        for number in range(len(self._hashes), full):
            own = np.array(tokens[number * size : (number + 1) * size], dtype="<i8").tobytes()
            before = self._hashes[-1] if self._hashes else self.salt
            self._hashes.append(hashlib.blake2b(before + own, digest_size=_BYTES).digest())
        return self._hashes[:full]
