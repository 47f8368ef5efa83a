"""Which workers live, as their heartbeats tell."""

from shared.clock import Clock
from shared.schemas import Announce
from shared.vocabulary import ReplicaId


class Workers:
    """The newest announcement of each replica and when it came."""

    def __init__(self, clock: Clock, lost_s: float) -> None:
        self._clock = clock
        self._lost_s = lost_s
        self._began_unix_s = clock.unix_s()
        self._heard: dict[ReplicaId, tuple[Announce, float]] = {}

    def heard(self, announce: Announce) -> bool:
        """True if this is a new incarnation: what the old one held is stranded."""
        before = self._heard.get(announce.replica)
        if before is not None and before[0].at_unix_s > announce.at_unix_s:
            return False
        self._heard[announce.replica] = (announce, self._clock.unix_s())
        return before is not None and before[0].incarnation != announce.incarnation

    def any(self) -> Announce | None:
        """The worker with the longest context that lives; all serve the same model."""
        living = [a for a, at in self._heard.values() if self._clock.unix_s() - at <= self._lost_s]
        return max(living, key=lambda a: a.context_tokens, default=None)

    def lives(self, replica: ReplicaId, incarnation: str) -> bool | None:
        """None: cannot be told yet."""
        now = self._clock.unix_s()
        heard = self._heard.get(replica)
        if heard is not None and now - heard[1] <= self._lost_s:
            return heard[0].incarnation == incarnation
        return None if now - self._began_unix_s <= self._lost_s else False

    def forget(self) -> None:
        """We heard nothing for a while, whoever lived: nobody is judged before heartbeats have had time to come again."""
        self._began_unix_s = self._clock.unix_s()
        self._heard.clear()

    def newly_lost(self) -> list[ReplicaId]:
        """Replicas silent for too long since the last time this was asked; they are forgotten by it."""
        now = self._clock.unix_s()
        lost = [replica for replica, (_, at) in self._heard.items() if now - at > self._lost_s]
        for replica in lost:
            del self._heard[replica]
        return lost
