"""What routers believe of replicas: the planners' digests, with one's own recent placements debited.

State half a second old costs nothing if the router adds what it has placed since, and ruins it if not.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from msgspec.structs import replace

from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId

STALE_S = 2.0  # a replica whose planner has been silent this long is not offered anything
TOKEN_S = 1e-4  # prefill seconds a token, where a digest shows no backlog to derive it from


class Route(Protocol):
    """A policy's router: replicas to offer to, best first."""

    def __call__(self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random) -> Sequence[ReplicaId]: ...


@dataclass(frozen=True, slots=True)
class _Placement:
    at_unix_s: float
    tokens: int
    best_effort: bool


class Debits:
    """The newest digest of each replica, and what this process has placed there since."""

    def __init__(self) -> None:
        self._digests: dict[ReplicaId, Digest] = {}
        self._placed: dict[ReplicaId, deque[_Placement]] = {}

    def heard(self, digest: Digest) -> None:
        known = self._digests.get(digest.replica)
        if known is not None and known.at_unix_s > digest.at_unix_s:
            return
        self._digests[digest.replica] = digest
        placed = self._placed.get(digest.replica)
        # A placement shows in a digest once the planner has answered it: keep it a little longer than its instant.
        while placed and placed[0].at_unix_s < digest.at_unix_s - 0.05:
            placed.popleft()

    def placed(self, replica: ReplicaId, tokens: int, now_unix_s: float, *, best_effort: bool = False) -> None:
        self._placed.setdefault(replica, deque(maxlen=1024)).append(_Placement(now_unix_s, tokens, best_effort))

    def gone(self, replica: ReplicaId) -> None:
        """It declined for want of a planner, or was declared lost: nothing is known of it until its next digest."""
        self._digests.pop(replica, None)
        self._placed.pop(replica, None)

    def raw(self, replica: ReplicaId) -> Digest | None:
        return self._digests.get(replica)

    def views(self, now_unix_s: float) -> dict[ReplicaId, Digest]:
        """Fresh, accepting replicas, debited; sorted by id, so that equal inputs give equal orders."""
        return {
            replica: self._debited(digest)
            for replica, digest in sorted(self._digests.items())
            if digest.accepting and now_unix_s - digest.at_unix_s <= STALE_S
        }

    def _debited(self, digest: Digest) -> Digest:
        placed = self._placed.get(digest.replica)
        if not placed:
            return digest
        tokens = sum(p.tokens for p in placed)
        per_token_s = digest.backlog_s / digest.waiting_prefill_tokens if digest.waiting_prefill_tokens else TOKEN_S
        return replace(
            digest,
            waiting=digest.waiting + sum(not p.best_effort for p in placed),
            best_effort=digest.best_effort + sum(p.best_effort for p in placed),
            waiting_prefill_tokens=digest.waiting_prefill_tokens + tokens,
            backlog_s=digest.backlog_s + tokens * per_token_s,
            kv_free_blocks=max(digest.kv_free_blocks - tokens // 16, 0),
            free_slots=max(digest.free_slots - len(placed), 0),
            surplus=False,
        )
