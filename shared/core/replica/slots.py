"""The slots of one replica, one for each request: free, taken, or in quarantine after an end."""

from collections import deque
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush

from shared.schemas import Offer
from shared.vocabulary import RequestKey

Attempt = tuple[RequestKey, int]


def attempt_of(offer: Offer) -> Attempt:
    return offer.key, offer.attempt


class Slots:
    def __init__(self) -> None:
        self._free: list[int] = []  # heap: lowest slot first, so that rows stay dense
        self._quarantine: deque[tuple[int, int]] = deque()  # slot, last plan that may name it
        self._of: dict[Attempt, int] = {}

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def of(self, offer: Offer) -> int | None:
        """The slot that this attempt has."""
        return self._of.get(attempt_of(offer))

    def begin(self, count: int, taken: AbstractSet[int]) -> None:
        """After a resync: all of `count` slots are free but those taken, which come by `assign`."""
        self._quarantine.clear()
        self._of.clear()
        self._free = [slot for slot in range(count) if slot not in taken]
        heapify(self._free)

    def take(self, offer: Offer) -> int | None:
        """The lowest free slot, for this attempt; None if there is none."""
        if not self._free:
            return None
        slot = heappop(self._free)
        self.assign(offer, slot)
        return slot

    def assign(self, offer: Offer, slot: int) -> None:
        self._of[attempt_of(offer)] = slot

    def forget(self, offer: Offer) -> None:
        """The attempt has no slot any more."""
        self._of.pop(attempt_of(offer), None)

    def give_back(self, slot: int) -> None:
        """The slot is free; no plan has named it."""
        heappush(self._free, slot)

    def retire(self, slot: int, last_seq: int) -> None:
        """The slot's request has ended; plans up to `last_seq` may name the slot."""
        self._quarantine.append((slot, last_seq))

    def release(self, acked_seq: int) -> None:
        """Free the slots that no plan still to run may name."""
        while self._quarantine and self._quarantine[0][1] <= acked_seq:
            heappush(self._free, self._quarantine.popleft()[0])

    def check(self, held: AbstractSet[int], reserved: AbstractSet[int], count: int | None) -> None:
        """Raises AssertionError if a free slot is in use, or if one of the `count` is lost."""
        free, quarantined = set(self._free), {slot for slot, _ in self._quarantine}
        assert not free & held, "a free slot is held"
        assert not free & reserved, "a free slot is reserved"
        assert not free & quarantined, "a free slot is in quarantine"
        known = free | quarantined | held | reserved
        # a worker that comes back with fewer slots may leave a reservation beyond them
        assert count is None or known >= set(range(count)), "a slot is lost"
