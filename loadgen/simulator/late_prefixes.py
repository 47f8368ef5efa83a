"""Delays what routers hear of prefixes, and nothing else of a digest: the price of an old index."""

from collections import deque

from msgspec.structs import replace

from shared.prefix import Changes, Where, hashes_of, pack_hashes
from shared.schemas import Digest
from shared.vocabulary import ReplicaId


class LatePrefixes:
    """Digests whose prefixes are as they were `late_s` ago. None may be lost."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._coming: dict[ReplicaId, deque[Digest]] = {}
        self._seq: dict[ReplicaId, int] = {}

    def of(self, digest: Digest) -> Digest:
        replica, coming = digest.replica, self._coming.setdefault(digest.replica, deque())
        coming.append(digest)
        changes = Changes()
        while coming and coming[0].at_unix_s <= digest.at_unix_s - self._late_s:
            come = coming.popleft()
            for each in hashes_of(come.prefixes_dropped):
                changes.note(each, Where.NOWHERE)
            for each in hashes_of(come.prefixes_kept):
                changes.note(each, Where.GPU)
        kept, _, dropped = map(pack_hashes, changes.take())
        seq = self._seq[replica] = self._seq.get(replica, 0) + bool(kept or dropped)
        return replace(digest, prefix_seq=seq, prefixes_kept=kept, prefixes_dropped=dropped)
