"""The index of a replica: the prefixes that its engine keeps, as its acks tell, and so the part of
a prompt that it will find there. A prefix (shared/prefix.py) is found as far as all its hashes
are kept.
"""

from collections.abc import Sequence
from itertools import islice

from msgspec.structs import replace

from shared.prefix import CHAIN_TOKENS, PLACES, hashes_of, pack_hashes
from shared.schemas import Offer, Prefixes

LIMIT = 1 << 18  # hashes; an engine of 16 million tokens has no more
TOLD_LIMIT = 1024  # hashes in a digest: 8 KiB
ALL_LIMIT = 1 << 15  # hashes that a router is told of one replica at once: 256 KiB


class KeptPrefixes:
    """The index of one incarnation. `block_tokens`, `snapshot`: of its engine, at the resync.
    `first_seq`: where the numbers of the digests begin, unless the engine keeps nothing.
    """

    def __init__(self, block_tokens: int = 1, snapshot: bytes = b"", first_seq: int = 0) -> None:
        self._block_tokens = block_tokens
        self._kept = dict.fromkeys(hashes_of(snapshot))  # the newest last
        self._seq = first_seq if self._kept else 0
        self._untold: dict[int, bool] = {}  # kept or dropped since the last digest
        self._found: dict[int, tuple[bytes, list[int], int]] = {}  # by slot

    def __bool__(self) -> bool:
        return len(self._kept) > 0

    def change(self, kept: bytes, dropped: bytes) -> None:
        """An iteration has made the engine keep and drop these hashes."""
        if not (kept or dropped):
            return
        for each in hashes_of(dropped):
            self._kept.pop(each, None)
            self._untold[each] = False
        for each in hashes_of(kept) if len(self._kept) < LIMIT else ():
            self._kept[each] = None
            self._untold[each] = True

    def tell(self) -> tuple[int, bytes, bytes]:
        """The number of the next digest that tells changes, and what is kept and dropped since the
        one before. A digest has room for TOLD_LIMIT of them.
        """
        if not self._untold:
            return self._seq, b"", b""
        told = list(islice(self._untold.items(), TOLD_LIMIT))
        self._seq += 1
        for each, _ in told:
            del self._untold[each]
        kept = pack_hashes([each for each, stays in told if stays])
        return self._seq, kept, pack_hashes([each for each, stays in told if not stays])

    def all(self) -> Prefixes:
        """All that is kept, as far as routers are told: the newest."""
        first = max(0, len(self._kept) - ALL_LIMIT)
        return Prefixes(seq=self._seq, kept=pack_hashes(list(islice(self._kept, first, None))))

    def found(self, waiting: Sequence[tuple[int, bytes]]) -> list[int]:
        """The tokens that each of these requests, by slot and prefix, will find. It is to be called
        with all that wait: what was found before of these is where the next look begins.
        """
        found = {}
        for slot, prefix in waiting:
            before = self._found.get(slot)
            if before is None or before[0] is not prefix:
                before = prefix, hashes_of(prefix), 0
            found[slot] = prefix, before[1], self._count(before[1], before[2])
        self._found = found
        return [_tokens(count) for _, _, count in found.values()]

    def offered(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """The offers with what they would find."""
        if not self._kept:
            return offers
        return [self._offered(offer) for offer in offers]

    def _offered(self, offer: Offer) -> Offer:
        found = _tokens(self._count(hashes_of(offer.prefix), 0))
        if not found:
            return offer
        known = offer.prompt_tokens + offer.generated_tokens
        return replace(offer, cached_tokens=self.usable(found, known))

    def usable(self, found_tokens: int, known_tokens: int) -> int:
        """The part of what is found that saves work: the last token is always computed, for the
        next one, and its block with it.
        """
        size = self._block_tokens
        return min(found_tokens, (known_tokens - 1) // size * size)

    def _count(self, hashes: Sequence[int], count: int) -> int:
        """The hashes that are kept, from the first on. `count`: as it was before. An engine drops
        the end of a prompt first.
        """
        kept = self._kept
        while count < len(hashes) and hashes[count] in kept:
            count += 1
        while count and hashes[count - 1] not in kept:
            count -= 1
        return count


def _tokens(count: int) -> int:
    return CHAIN_TOKENS * PLACES[count - 1] if count else 0
