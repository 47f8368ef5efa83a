"""KV that moves between replicas in virtual time. Each replica has one link, as fast out as in.
What is to move is sent in the order in which it was computed, and holds both links until it has
come.
"""

from dataclasses import dataclass, field

from shared.prefix import CHAIN_TOKENS
from shared.schemas import Announce
from shared.vocabulary import ReplicaId, RequestKey


@dataclass(slots=True)
class _Move:
    """One request's KV on its way. All counts are hashes of its chain."""

    source: ReplicaId
    target: ReplicaId
    hash_s: float  # that a hash's KV takes
    there: int  # that the target had
    sent: int
    come: list[tuple[float, int]] = field(default_factory=list)  # until when, how many are there


class Moves:
    def __init__(self) -> None:
        self._moves: dict[RequestKey, _Move] = {}
        self._out_s: dict[ReplicaId, float] = {}  # until when each link is taken
        self._in_s: dict[ReplicaId, float] = {}

    def begin(self, key: RequestKey, source: ReplicaId, target: Announce, there: int) -> None:
        """The KV of this request is to move, but for the first `there`, which the target has."""
        hash_s = CHAIN_TOKENS * target.kv_move_s
        self._moves[key] = _Move(source, target.replica, hash_s, there, there)

    def under_way(self, key: RequestKey, target: ReplicaId) -> bool:
        move = self._moves.get(key)
        return move is not None and move.target == target

    def computed(self, key: RequestKey, source: ReplicaId, hashes: int, now_s: float) -> None:
        """So many are there at the source: those that are new leave."""
        move = self._moves.get(key)
        if move is None or move.source != source or hashes <= move.sent:
            return
        begins_s = max(now_s, self._out_s.get(source, 0.0), self._in_s.get(move.target, 0.0))
        ends_s = begins_s + move.hash_s * (hashes - move.sent)
        self._out_s[source] = self._in_s[move.target] = ends_s
        move.sent = hashes
        move.come.append((ends_s, hashes))

    def end(self, key: RequestKey, until_s: float) -> tuple[float, int]:
        """The instant at which all that was sent is there, or `until_s` if that is sooner, and how
        much is there by then. What has not come by then is not waited for.
        """
        move = self._moves.pop(key)
        there = max((n for at_s, n in move.come if at_s <= until_s), default=move.there)
        last_s = move.come[-1][0] if move.come else -1.0
        return min(last_s, until_s), there

    def forget(self, key: RequestKey) -> None:
        """The request has ended, or goes on elsewhere."""
        self._moves.pop(key, None)
