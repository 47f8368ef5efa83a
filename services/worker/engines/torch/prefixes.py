"""Prefix caching: a sequence begins with blocks that others computed of the same tokens. A full
block is known by a hash of itself and of the block before, as in vLLM. The hash is cryptographic,
so no client can make its text pass for another's.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from services.worker.engine import KvName
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
        found = blocks.find(self.hashes(tokens, len(tokens) - 1))
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
        hashes = self.hashes(tokens, computed)
        if full * self._block_tokens // CHAIN_TOKENS > len(self._chain):
            extend(self._chain, tokens[:computed], self.salt)
        for number in range(self._named, full):
            blocks.name(place, number, KvName(hashes[number], self._mark(number + 1)))
        self._named = full

    def names(self, tokens: Sequence[int]) -> list[KvName]:
        """The names of the full blocks of these tokens, all of them."""
        hashes = self.hashes(tokens, len(tokens))
        extend(self._chain, tokens, self.salt)
        return [KvName(each, self._mark(number)) for number, each in enumerate(hashes, 1)]

    def _mark(self, blocks: int) -> int | None:
        """The hash of the prefix that ends with so many blocks; the chain goes as far."""
        places, rest = divmod(blocks * self._block_tokens, CHAIN_TOKENS)
        return None if rest or places not in IS_PLACE else self._chain[places - 1]

    def restart(self) -> None:
        """The place is a new one. The text, and its hashes, are the same."""
        self._named = 0

    def hashes(self, tokens: Sequence[int], upto: int) -> list[bytes]:
        """The hashes of the full blocks of the first `upto` tokens."""
        size, full = self._block_tokens, upto // self._block_tokens
        first = len(self._hashes)
        if first < full:
            own = np.array(tokens[first * size : full * size], dtype="<i8").tobytes()
            before = self._hashes[-1] if self._hashes else self.salt
            for at in range(0, len(own), 8 * size):
                each = own[at : at + 8 * size]
                before = hashlib.blake2b(before + each, digest_size=_BYTES).digest()
                self._hashes.append(before)
        return self._hashes[:full]
