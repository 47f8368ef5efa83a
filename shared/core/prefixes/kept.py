"""The index of a replica: the prefixes that its engine keeps, as its acks tell, and so the part of
a prompt that it will find there, and the seconds for what must come back from the host's memory. A
prefix (shared/prefix.py) is found as far as all its hashes are kept.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from shared.prefix import CHAIN_TOKENS, PLACES, hashes_of, pack_hashes
from shared.schemas import Announce, Offer, Prefixes

LIMIT = 1 << 18  # hashes; an engine of 16 million tokens has no more
TOLD_LIMIT = 1024  # hashes in a digest: 8 KiB
ALL_LIMIT = 1 << 15  # hashes that a router is told of one replica at once: 256 KiB


class Found(NamedTuple):
    """The part of a prompt that is kept, and the seconds for what must come back to the GPU."""

    tokens: int = 0
    load_s: float = 0.0


class KeptPrefixes:
    """The index of one incarnation. `kept`, `moved`: on its GPU and in its host's memory, at the
    resync. `first_seq`: where the numbers of the digests begin, unless the engine keeps nothing.
    """

    def __init__(
        self,
        block_tokens: int = 1,
        kept: bytes = b"",
        moved: bytes = b"",
        *,
        first_seq: int = 0,
        kv_load_s: float = 0.0,
    ) -> None:
        self._block_tokens, self._kv_load_s = block_tokens, kv_load_s
        self._moved = set(hashes_of(moved))
        self._kept = dict.fromkeys([*hashes_of(moved), *hashes_of(kept)])  # the newest last
        self._seq = first_seq if self._kept else 0
        self._untold: dict[int, bool] = {}  # kept or dropped since the last digest
        self._found: dict[int, tuple[bytes, list[int], int]] = {}  # by slot

    def __bool__(self) -> bool:
        return len(self._kept) > 0

    def change(self, kept: bytes, dropped: bytes, moved: bytes = b"") -> None:
        """An iteration has made the engine keep, drop and move to the host these hashes. Routers
        are not told of moves: to load a token takes far less time than to compute it.
        """
        if not (kept or dropped or moved):
            return
        for each in hashes_of(dropped):
            self._kept.pop(each, None)
            self._moved.discard(each)
            self._untold[each] = False
        self._moved.update(each for each in hashes_of(moved) if each in self._kept)
        for each in hashes_of(kept) if len(self._kept) < LIMIT else ():
            self._moved.discard(each)
            if each not in self._kept:
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

    def found(self, waiting: Sequence[tuple[int, bytes]]) -> list[Found]:
        """The part that each of these requests, by slot and prefix, will find. Call it with all
        that wait: what was found before of these is where the next look begins.
        """
        found = {}
        for slot, prefix in waiting:
            before = self._found.get(slot)
            if before is None or before[0] is not prefix:
                before = prefix, hashes_of(prefix), 0
            found[slot] = prefix, before[1], self._count(before[1], before[2])
        self._found = found
        return [self._until(hashes, count) for _, hashes, count in found.values()]

    def offered(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """The offers with what they would find."""
        if not self._kept:
            return offers
        return [self._offered(offer) for offer in offers]

    def _offered(self, offer: Offer) -> Offer:
        hashes = hashes_of(offer.prefix)
        tokens, load_s = self._until(hashes, self._count(hashes, 0))
        if not tokens:
            return offer
        known = offer.prompt_tokens + offer.generated_tokens
        return replace(offer, cached_tokens=self.usable(tokens, known), load_s=load_s)

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

    def _until(self, hashes: Sequence[int], count: int) -> Found:
        """The part of a prompt that its first `count` hashes stand for, which are kept."""
        if not count:
            return Found()
        moved, blocks = self._moved, 0
        if moved and not moved.isdisjoint(hashes[:count]):
            steps = zip(hashes, (0, *PLACES[: count - 1]), PLACES, strict=False)
            blocks = sum(end - begin for each, begin, end in steps if each in moved)
        return Found(CHAIN_TOKENS * PLACES[count - 1], self._kv_load_s * CHAIN_TOKENS * blocks)


def index_of(facts: Announce, kept: bytes, moved: bytes, epoch: int) -> KeptPrefixes:
    """The index of a worker as it reports itself to the planner of this epoch."""
    return KeptPrefixes(
        facts.block_tokens, kept, moved, first_seq=epoch << 20, kv_load_s=facts.kv_load_s
    )
