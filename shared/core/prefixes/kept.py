"""The index of a replica: the prefixes that its engine keeps, as its acks tell, and so the part of
a prompt that it will find there. A prefix (shared/prefix.py) is found as far as all its hashes
are kept.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from shared.prefix import CHAIN_TOKENS, PLACES, hashes_of
from shared.schemas import Offer

LIMIT = 1 << 18  # hashes; an engine of 16 million tokens has no more


class KeptPrefixes:
    """The index of one incarnation. `block_tokens`, `snapshot`: of its engine, at the resync."""

    def __init__(self, block_tokens: int = 1, snapshot: bytes = b"") -> None:
        self._block_tokens = block_tokens
        self._kept = set(hashes_of(snapshot))
        self._found: dict[int, tuple[bytes, list[int], int]] = {}  # by slot

    def __bool__(self) -> bool:
        return len(self._kept) > 0

    def change(self, kept: bytes, dropped: bytes) -> None:
        """An iteration has made the engine keep and drop these hashes."""
        if dropped:
            self._kept.difference_update(hashes_of(dropped))
        if kept and len(self._kept) < LIMIT:
            self._kept.update(hashes_of(kept))

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
