"""The prefixes that replicas keep, as a router knows them: from the digests of their planners, and
from what it has placed itself a moment ago.

Digests tell changes, numbered. After a gap, or where a planner is new, a replica's prefixes are
*lacking*: nothing is found there until its planner has told all of them.
"""

import math
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from shared.prefix import CHAIN_TOKENS, PLACES, hashes_of
from shared.schemas import Digest, Offer, Prefixes
from shared.vocabulary import ReplicaId

PLACED_S = 60.0  # the longest that a placement counts as kept
PLACED_LIMIT = 1024  # placements of one replica that are noted


@dataclass(slots=True)
class _Replica:
    """One replica. `source`: the planner and the incarnation that told these."""

    source: tuple[str, str]
    seq: int
    kept: set[int]
    placed: dict[int, float] = field(default_factory=dict)  # hash -> until when it counts
    ends: deque[tuple[float, list[int]]] = field(default_factory=deque)

    def count(self, hashes: Sequence[int], now_unix_s: float) -> int:
        """The hashes that are kept or on their way, from the first on."""
        kept, placed = self.kept, self.placed
        for count, each in enumerate(hashes):
            if each not in kept and placed.get(each, -math.inf) <= now_unix_s:
                return count
        return len(hashes)

    def place(self, hashes: list[int], until_unix_s: float, now_unix_s: float) -> None:
        for each in hashes:
            self.placed[each] = max(until_unix_s, self.placed.get(each, -math.inf))
        self.ends.append((until_unix_s, hashes))
        while self.ends and (self.ends[0][0] <= now_unix_s or len(self.ends) > PLACED_LIMIT):
            until_unix_s, over = self.ends.popleft()
            for each in over:
                if self.placed.get(each, math.inf) <= until_unix_s:
                    del self.placed[each]


class KnownPrefixes:
    """All replicas of which digests were heard."""

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._lacking: dict[ReplicaId, tuple[str, str]] = {}

    @property
    def lacking(self) -> Sequence[ReplicaId]:
        """The replicas whose planners are to be asked for all that is kept there."""
        return list(self._lacking)

    def heard(self, digest: Digest) -> None:
        source, seq = (digest.planner, digest.incarnation), digest.prefix_seq
        known = self._replicas.get(digest.replica)
        if known is None or known.source != source or seq < known.seq:
            self.gone(digest.replica)
            if seq == 0:  # nothing was ever kept there
                self._replicas[digest.replica] = _Replica(source, 0, set())
            else:
                self._lacking[digest.replica] = source
        elif seq == known.seq + 1 and (digest.prefixes_kept or digest.prefixes_dropped):
            known.seq = seq
            known.kept.difference_update(hashes_of(digest.prefixes_dropped))
            known.kept.update(hashes_of(digest.prefixes_kept))
        elif seq != known.seq:
            self._lacking[digest.replica] = source

    def told(self, replica: ReplicaId, prefixes: Prefixes) -> None:
        """A planner has told all that is kept at its replica."""
        source = self._lacking.pop(replica, None)
        if source is not None:
            self._replicas[replica] = _Replica(source, prefixes.seq, set(hashes_of(prefixes.kept)))

    def gone(self, replica: ReplicaId) -> None:
        self._replicas.pop(replica, None)
        self._lacking.pop(replica, None)

    def keep(self, replicas: Container[ReplicaId]) -> None:
        """Forget all but these replicas."""
        for replica in [*self._replicas, *self._lacking]:
            if replica not in replicas:
                self.gone(replica)

    def seen(
        self, offer: Offer, digests: Mapping[ReplicaId, Digest], now_unix_s: float
    ) -> Mapping[ReplicaId, Digest]:
        """The digests with the tokens of this prompt that each replica has, or will have soon."""
        if not offer.prefix:
            return digests
        hashes, prompt_tokens = hashes_of(offer.prefix), offer.prompt_tokens
        return {
            replica: replace(digest, cached_tokens=found)
            if (found := self._found(replica, hashes, prompt_tokens, now_unix_s))
            else digest
            for replica, digest in digests.items()
        }

    def found(
        self, replica: ReplicaId, prefix: bytes, prompt_tokens: int, now_unix_s: float
    ) -> int:
        """The tokens of a prompt that the replica has, or will have soon."""
        return self._found(replica, hashes_of(prefix), prompt_tokens, now_unix_s) if prefix else 0

    def _found(
        self, replica: ReplicaId, hashes: Sequence[int], prompt_tokens: int, now_unix_s: float
    ) -> int:
        known = self._replicas.get(replica)
        count = 0 if known is None else known.count(hashes, now_unix_s)
        return min(CHAIN_TOKENS * PLACES[count - 1], prompt_tokens - 1) if count else 0

    def placed(self, replica: ReplicaId, offer: Offer, now_unix_s: float) -> None:
        """The prompt is on its way there: others may count on it until its first token is due."""
        known = self._replicas.get(replica)
        if known is not None and offer.prefix:
            due_unix_s = min(offer.next_due_unix_s, now_unix_s + PLACED_S)
            known.place(hashes_of(offer.prefix), due_unix_s, now_unix_s)
