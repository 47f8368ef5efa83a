"""The requests that one worker holds: by slot and by key, with their KV blocks and the ends that
are due; and the attempts that it must refuse.
"""

from collections import OrderedDict
from collections.abc import Iterator

from shared.core.worker.held_request import HeldRequest
from shared.schemas import Held
from shared.vocabulary import RequestKey

TOMBSTONES = 4096  # remembered withdrawals and cancels
EVERY_ATTEMPT = 1 << 30


class Holdings:
    """The requests held. A slot, its KV blocks and its due end change only through methods."""

    def __init__(self, *, kv_blocks: int, block_tokens: int) -> None:
        self._kv_blocks = kv_blocks
        self._block_tokens = block_tokens
        self._held_blocks = 0  # the sum over all requests, kept because every ack reports it
        # Of that sum, what the engine saves because requests share blocks. It was so when the
        # engine last ran; of what has left since, all may have been shared.
        self.shared_blocks = 0
        self.draft_shared_blocks = 0  # the same in the draft model's own KV
        self._requests: dict[int, HeldRequest] = {}
        self._slot_of: dict[RequestKey, int] = {}
        self._ending: set[int] = set()  # slots that end at the next boundary
        self._new: list[Held] = []  # taken in since the last ack
        # slots that engine and processor must forget before their next work
        self._releases: list[int] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(self._requests.values())

    def __contains__(self, slot: int) -> bool:
        return slot in self._requests

    def __getitem__(self, slot: int) -> HeldRequest:
        return self._requests[slot]

    def get(self, slot: int) -> HeldRequest | None:
        return self._requests.get(slot)

    def of(self, key: RequestKey) -> HeldRequest | None:
        slot = self._slot_of.get(key)
        return None if slot is None else self._requests[slot]

    # ------------------------------------------------------------ in and out

    def add(self, request: HeldRequest, at_unix_s: float) -> Held:
        """Add a request. Returns the hold that the next ack reports."""
        self._requests[request.slot] = request
        self._slot_of[request.record.key] = request.slot
        held = request.held(at_unix_s)
        self._new.append(held)
        return held

    def remove(self, request: HeldRequest) -> None:
        """Free the slot, and drop its due end. The engine forgets the slot before its next work."""
        del self._requests[request.slot]
        del self._slot_of[request.record.key]
        self._ending.discard(request.slot)
        self._evict(request)

    def take_new(self) -> list[Held]:
        """The holds that the next ack reports."""
        new, self._new = self._new, []
        return new

    def reported(self) -> list[HeldRequest]:
        """The requests whose hold is in an ack."""
        new = {held.key for held in self._new}
        return [request for request in self if request.record.key not in new]

    def take_releases(self) -> list[int]:
        releases, self._releases = self._releases, []
        return releases

    # ------------------------------------------------------------ ends

    def end_later(self, request: HeldRequest, why: str) -> None:
        """End the request at the next boundary between iterations."""
        request.pending_end = why
        self._ending.add(request.slot)

    @property
    def ending(self) -> int:
        """The number of ends that are due."""
        return len(self._ending)

    def is_ending(self, slot: int) -> bool:
        return slot in self._ending

    def due(self) -> list[HeldRequest]:
        """The requests whose end is due, by slot."""
        return [self._requests[slot] for slot in sorted(self._ending)]

    def evict_ending(self) -> None:
        """Free the KV of requests whose end is due; they are removed with the next ack."""
        for slot in self._ending:
            self._evict(self._requests[slot])

    # ------------------------------------------------------------ KV

    def fill(self, request: HeldRequest, computed: int) -> None:
        """Sets the filled KV positions of the request to `computed`."""
        self._held_blocks += self._blocks(computed) - self._blocks(request.computed)
        request.computed = computed

    def preempt(self, slot: int) -> bool:
        """Drop the KV of a request and keep its tokens. False if the engine has nothing of it."""
        request = self._requests.get(slot)
        if request is None or not request.loaded:
            return False
        self._leave(request)
        return True

    def _evict(self, request: HeldRequest) -> None:
        """The request's KV and text leave the engine before the next work."""
        if request.loaded:
            self._releases.append(request.slot)
            request.had = request.computed
        request.loaded = False
        self._leave(request)

    def _leave(self, request: HeldRequest) -> None:
        self.shared_blocks = max(0, self.shared_blocks - self._blocks(request.computed))
        self.draft_shared_blocks = max(0, self.draft_shared_blocks - self._blocks(request.drafted))
        self.fill(request, 0)
        request.drafted = 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    @property
    def free_blocks(self) -> int:
        return self._kv_blocks - self._held_blocks + self.shared_blocks

    def check(self) -> None:
        """Raises AssertionError unless the books balance."""
        assert self.free_blocks >= 0, "KV beyond capacity"
        blocks = sum(self._blocks(request.computed) for request in self)
        assert self._held_blocks == blocks, "blocks do not add up"
        assert {r.record.key: s for s, r in self._requests.items()} == self._slot_of
        assert self._ending <= set(self._requests)
        for request in self:
            request.check()


class Tombstones:
    """Attempts that were withdrawn or cancelled: a late hold of such an attempt is refused."""

    def __init__(self) -> None:
        self._highest: OrderedDict[RequestKey, int] = OrderedDict()

    def bury(self, key: RequestKey, attempt: int) -> None:
        """Refuse this attempt of the request and those before it. The oldest tombstones give way to
        the newest.
        """
        self._highest[key] = max(attempt, self._highest.get(key, -1))
        self._highest.move_to_end(key)
        if len(self._highest) > TOMBSTONES:
            self._highest.popitem(last=False)

    def buried(self, key: RequestKey, attempt: int) -> bool:
        return attempt <= self._highest.get(key, -1)
