"""Requests that this admission has placed at one replica and that go on at another: until they are
there, the other's digests do not show them.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, RequestKey

LIMIT = 4096  # requests; those beyond are not counted
LONGEST_S = 60.0  # a request counts until its first token is due, no longer


@dataclass(slots=True)
class _Sum:
    """The requests that come to one replica, and their tokens."""

    requests: int = 0
    tokens: int = 0


class Coming:
    """Counts them, by the replica that they come to, until their first tokens are due."""

    def __init__(self) -> None:
        self._coming: dict[RequestKey, tuple[ReplicaId, int]] = {}  # where to, and its tokens
        self._sums: dict[ReplicaId, _Sum] = {}
        self._until: deque[tuple[float, RequestKey]] = deque()

    def add(self, replica: ReplicaId, offer: Offer, now_unix_s: float) -> None:
        while self._until and self._until[0][0] <= now_unix_s:
            self.gone(self._until.popleft()[1])
        self.gone(offer.key)
        if len(self._until) < LIMIT:
            self._coming[offer.key] = replica, offer.prompt_tokens
            found = self._sums.setdefault(replica, _Sum())
            found.requests += 1
            found.tokens += offer.prompt_tokens
            due_unix_s = min(offer.next_due_unix_s, now_unix_s + LONGEST_S)
            self._until.append((due_unix_s, offer.key))

    def gone(self, key: RequestKey) -> None:
        """The request is where it was to go on, or somewhere else."""
        if (known := self._coming.pop(key, None)) is not None:
            found = self._sums[known[0]]
            found.requests -= 1
            found.tokens -= known[1]
            if not found.requests:
                del self._sums[known[0]]

    def seen(self, digests: Mapping[ReplicaId, Digest]) -> Mapping[ReplicaId, Digest]:
        """The digests as they will be with these requests."""
        if not self._sums:
            return digests
        return {
            replica: digest if found is None else _with(digest, found)
            for replica, digest in digests.items()
            for found in (self._sums.get(replica),)
        }

    def check(self) -> None:
        """Raises AssertionError unless the sums are those of the requests."""
        for replica, found in self._sums.items():
            tokens = [tokens for to, tokens in self._coming.values() if to == replica]
            assert (found.requests, found.tokens) == (len(tokens), sum(tokens)), "sums are off"


def _with(digest: Digest, coming: _Sum) -> Digest:
    decodes = digest.running + 1
    return replace(
        digest,
        running=digest.running + coming.requests,
        decode_s=digest.decode_s * (decodes + coming.requests) / decodes,
        kv_free_blocks=max(digest.kv_free_blocks - coming.tokens // digest.block_tokens, 0),
        free_slots=max(digest.free_slots - coming.requests, 0),
    )
