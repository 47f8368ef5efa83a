"""Requests that this admission has placed at one replica and that go on at another: until they are
there, the other's digests do not show them.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, RequestKey

LIMIT = 4096  # requests; those beyond are not counted
LONGEST_S = 60.0  # a request counts until its first token is due, no longer


class _Coming(NamedTuple):
    replica: ReplicaId
    tokens: int


class Coming:
    def __init__(self) -> None:
        self._coming: dict[RequestKey, _Coming] = {}
        self._until: deque[tuple[float, RequestKey]] = deque()

    def add(self, replica: ReplicaId, offer: Offer, now_unix_s: float) -> None:
        while self._until and self._until[0][0] <= now_unix_s:
            self.gone(self._until.popleft()[1])
        if len(self._until) < LIMIT:
            tokens = offer.prompt_tokens + offer.generated_tokens
            self._coming[offer.key] = _Coming(replica, tokens)
            due_unix_s = min(offer.next_due_unix_s, now_unix_s + LONGEST_S)
            self._until.append((due_unix_s, offer.key))

    def gone(self, key: RequestKey) -> None:
        """The request is where it was to go on, or somewhere else."""
        self._coming.pop(key, None)

    def seen(self, digests: Mapping[ReplicaId, Digest]) -> Mapping[ReplicaId, Digest]:
        """The digests as they will be with these requests."""
        if not self._coming:
            return digests
        seen = dict(digests)
        for replica, tokens in self._coming.values():
            digest = seen.get(replica)
            if digest is not None:
                blocks = -(-tokens // digest.block_tokens)
                seen[replica] = replace(
                    digest,
                    running=digest.running + 1,
                    decode_s=digest.decode_s * (digest.running + 2) / (digest.running + 1),
                    kv_free_blocks=max(digest.kv_free_blocks - blocks, 0),
                    free_slots=max(digest.free_slots - 1, 0),
                )
        return seen
