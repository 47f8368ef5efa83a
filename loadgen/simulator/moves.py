"""KV that moves between replicas in virtual time. Each replica has one link, as fast out as in.
What is to move has both links for itself, in the order in which it was computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.simulator.timeline import Timeline
from shared.prefix import CHAIN_TOKENS
from shared.schemas import Announce
from shared.vocabulary import ReplicaId, RequestKey


@dataclass(slots=True, eq=False)
class _Move:
    """One request's KV on its way. All counts are hashes of its chain."""

    key: RequestKey
    source: ReplicaId
    target: ReplicaId
    hash_s: float  # that a hash's KV takes
    there: int
    sent: int
    waits: Callable[[int], None] | None = None


class _Part(NamedTuple):
    move: _Move
    hashes: int  # that are there once it has come
    lasts_s: float


class Moves:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._moves: dict[RequestKey, _Move] = {}
        self._parts: list[_Part] = []  # that have not left, in order
        self._out: set[ReplicaId] = set()  # whose links are taken
        self._in: set[ReplicaId] = set()

    def begin(self, key: RequestKey, source: ReplicaId, target: Announce, there: int) -> None:
        """The KV of this request is to move, but for the first `there`, which the target has."""
        self.forget(key)
        hash_s = CHAIN_TOKENS * target.kv_move_s
        self._moves[key] = _Move(key, source, target.replica, hash_s, there, there)

    def under_way(self, key: RequestKey, target: ReplicaId) -> bool:
        move = self._moves.get(key)
        return move is not None and move.target == target

    def computed(self, key: RequestKey, source: ReplicaId, hashes: int) -> None:
        """So many are there at the source: those that are new leave."""
        move = self._moves.get(key)
        if move is not None and move.source == source and hashes > move.sent:
            self._parts.append(_Part(move, hashes, move.hash_s * (hashes - move.sent)))
            move.sent = hashes
            self._go_on()

    def wait(self, key: RequestKey, most_s: float, then: Callable[[int], None]) -> None:
        """Call `then` with what is there, once all that was sent has come. What has not come after
        `most_s` no longer does.
        """
        move = self._moves[key]
        if move.there == move.sent or not most_s:
            self.forget(key)
            then(move.there)
        else:
            move.waits = then
            self._timeline.after(most_s, self._end, move)

    def forget(self, key: RequestKey) -> None:
        """The request has ended, or goes on elsewhere."""
        move = self._moves.pop(key, None)
        if move is not None and move.there < move.sent:
            self._parts = [part for part in self._parts if part.move is not move]
            self._go_on()

    def _end(self, move: _Move) -> None:
        if self._moves.get(move.key) is move and move.waits is not None:
            self.forget(move.key)
            move.waits(move.there)

    def _go_on(self) -> None:
        """Parts leave that wait for no link, and for none before them."""
        out, into, left = set(self._out), set(self._in), list[_Part]()
        for part in self._parts:
            source, target = part.move.source, part.move.target
            if source in out or target in into:
                left.append(part)
            else:
                self._out.add(source)
                self._in.add(target)
                self._timeline.after(part.lasts_s, self._come, part)
            out.add(source)
            into.add(target)
        self._parts = left

    def _come(self, part: _Part) -> None:
        move = part.move
        self._out.discard(move.source)
        self._in.discard(move.target)
        move.there = part.hashes
        self._go_on()
        if move.there == move.sent and move.waits is not None:
            self._end(move)
