"""Replicas as routers see them: each planner's newest digest (its load and room), less what was
placed there since, which that digest does not show yet. A digest's age counts from its arrival
here, as clocks differ; a planner's own instants only order its digests.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from shared.schemas import Digest
from shared.vocabulary import ReplicaId

STALE_S = 2.0  # a replica whose planner has been silent this long is offered nothing
FORGET_S = 600.0  # and after this long it is forgotten: ids that come once must not pile up
# a placement shows in a digest once the planner has answered it: it stays debited a little longer
ON_ITS_WAY_S = 0.05
PLACED_LIMIT = 1024  # placements debited of one replica; a digest each 0.1 s leaves far fewer
TOKEN_S = 1e-4  # prefill seconds a token, where a digest shows no backlog to derive it from


@dataclass(frozen=True, slots=True)
class _Placement:
    at_unix_s: float
    tokens: int
    best_effort: bool


@dataclass(slots=True)
class _Known:
    """One replica. `tokens`, `best_effort`: sums over `placed`; `debited`: valid for those."""

    digest: Digest  # at_unix_s: when it was received, by the local clock
    published_unix_s: float  # by its planner's clock
    placed: deque[_Placement] = field(default_factory=deque)
    tokens: int = 0
    best_effort: int = 0
    debited: Digest | None = None

    def add(self, placement: _Placement) -> None:
        self.placed.append(placement)
        self.tokens += placement.tokens
        self.best_effort += placement.best_effort
        self.debited = None
        if len(self.placed) > PLACED_LIMIT:
            self._drop()

    def receive(self, digest: Digest, published_unix_s: float) -> None:
        self.digest, self.published_unix_s, self.debited = digest, published_unix_s, None
        while self.placed and self.placed[0].at_unix_s < digest.at_unix_s - ON_ITS_WAY_S:
            self._drop()

    def view(self) -> Digest:
        if self.debited is None:
            self.debited = self._debit() if self.placed else self.digest
        return self.debited

    def _drop(self) -> None:
        oldest = self.placed.popleft()
        self.tokens -= oldest.tokens
        self.best_effort -= oldest.best_effort

    def _debit(self) -> Digest:
        digest = self.digest
        per_token_s = (
            digest.backlog_s / digest.waiting_prefill_tokens
            if digest.waiting_prefill_tokens
            else TOKEN_S
        )
        return replace(
            digest,
            waiting=digest.waiting + len(self.placed) - self.best_effort,
            best_effort=digest.best_effort + self.best_effort,
            waiting_prefill_tokens=digest.waiting_prefill_tokens + self.tokens,
            backlog_s=digest.backlog_s + self.tokens * per_token_s,
            kv_free_blocks=max(digest.kv_free_blocks - self.tokens // digest.block_tokens, 0),
            free_slots=max(digest.free_slots - len(self.placed), 0),
            surplus=False,
        )


class LoadView:
    """The newest digest of each replica, dated by its arrival, and what was placed there since."""

    def __init__(self) -> None:
        self._known: dict[ReplicaId, _Known] = {}  # in the order in which they were last received
        self._sorted: list[ReplicaId] = []

    def received(self, digest: Digest, now_unix_s: float) -> bool:
        """Keep a digest; False if it or a later one of its planner and incarnation came before."""
        replica, published_unix_s = digest.replica, digest.at_unix_s
        known = self._known.get(replica)
        local = replace(digest, at_unix_s=now_unix_s)
        if known is None:
            insort(self._sorted, replica)
            self._known[replica] = _Known(local, published_unix_s)
        else:
            before = known.digest
            same = before.planner == digest.planner and before.incarnation == digest.incarnation
            if same and known.published_unix_s >= published_unix_s:
                return False
            known.receive(local, published_unix_s)
            self._known[replica] = self._known.pop(replica)
        while (oldest := next(iter(self._known.values())).digest).at_unix_s < now_unix_s - FORGET_S:
            self.gone(oldest.replica)
        return True

    def placed(
        self, replica: ReplicaId, tokens: int, now_unix_s: float, *, best_effort: bool = False
    ) -> None:
        """Debit an offer that leaves now. No effect on a replica that is not known."""
        known = self._known.get(replica)
        if known is not None:
            known.add(_Placement(now_unix_s, tokens, best_effort))

    def gone(self, replica: ReplicaId) -> None:
        """Forget a replica until its next digest: it has no planner, or was declared lost."""
        if self._known.pop(replica, None) is not None:
            del self._sorted[bisect_left(self._sorted, replica)]

    def raw(self, replica: ReplicaId) -> Digest | None:
        """The digest as received, however old."""
        known = self._known.get(replica)
        return None if known is None else known.digest

    def view(self, replica: ReplicaId) -> Digest | None:
        """The digest debited, however old."""
        known = self._known.get(replica)
        return None if known is None else known.view()

    def views(self, now_unix_s: float) -> dict[ReplicaId, Digest]:
        """Fresh digests, debited; sorted by id, so that equal inputs give equal orders."""
        return {
            replica: known.view()
            for replica in self._sorted
            if now_unix_s - (known := self._known[replica]).digest.at_unix_s <= STALE_S
        }

    def check(self) -> None:
        """Raises AssertionError unless the sums are those of the placements."""
        assert self._sorted == sorted(self._known), "the sorted ids are not those of the replicas"
        for known in self._known.values():
            assert known.tokens == sum(p.tokens for p in known.placed), "debited tokens"
            assert known.best_effort == sum(p.best_effort for p in known.placed), "debited requests"
