"""Which workers live, as their heartbeats tell; and how far their clocks are from ours."""

from collections.abc import Collection
from dataclasses import dataclass, field

import structlog

from shared.clock import Clock
from shared.features import abilities, meets
from shared.process.conventions import CLOCK_OFFSET
from shared.process.instruments import Registry
from shared.process.skew import Offset
from shared.schemas import Announce
from shared.vocabulary import ReplicaId

log = structlog.get_logger()

# beyond, deadlines measured on another host are off by more than a token's pace allows
OFFSET_LIMIT_S = 0.010
WARN_EVERY_S = 60.0
REPLICA_LIMIT = 256  # replicas with a gauge of their own; further ones share one


@dataclass(slots=True)
class _Heard:
    announce: Announce
    at_unix_s: float  # by our clock
    # of this incarnation: another process has another clock
    offset: Offset = field(default_factory=Offset)
    warned_unix_s: float = float("-inf")


class Workers:
    """The newest announcement of each replica and when it came."""

    def __init__(self, clock: Clock, lost_s: float, metrics: Registry) -> None:
        self._clock = clock
        self._lost_s = lost_s
        self._began_unix_s = clock.unix_s()
        self._heard: dict[ReplicaId, _Heard] = {}
        # features and adapters of every replica that there was since we began
        self.abilities: set[frozenset[str]] = set()
        self.models: set[str] = set()  # likewise
        text = "Clock of admission minus clock of the worker, seconds, the least latency of a heartbeat included."
        self._gauge = metrics.gauge(CLOCK_OFFSET, text, ("replica",), {"replica": REPLICA_LIMIT})

    def heard(self, announce: Announce) -> bool:
        """True if this is a new incarnation: what the old one held is stranded."""
        before, now = self._heard.get(announce.replica), self._clock.unix_s()
        if before is not None and before.announce.at_unix_s > announce.at_unix_s:
            return False
        self.abilities.add(abilities(announce))
        self.models.add(announce.model)
        if before is not None and before.announce.incarnation == announce.incarnation:
            before.announce, before.at_unix_s = announce, now
            self._compare(before)
            return False
        heard = self._heard[announce.replica] = _Heard(announce, now)
        if before is not None:
            heard.warned_unix_s = before.warned_unix_s
        self._compare(heard)
        return before is not None

    def living(self) -> list[Announce]:
        now = self._clock.unix_s()
        return [h.announce for h in self._heard.values() if now - h.at_unix_s <= self._lost_s]

    def any(self, needs: Collection[str] = ()) -> Announce | None:
        """Of the living workers that have what is needed the one with the longest context; all
        serve the same model.
        """
        return max(
            (a for a in self.living() if meets(a, needs)),
            key=lambda a: a.context_tokens,
            default=None,
        )

    @property
    def complete(self) -> bool:
        """We have listened for so long that a worker not heard of does not live."""
        return self._clock.unix_s() - self._began_unix_s > self._lost_s

    def lives(self, replica: ReplicaId, incarnation: str) -> bool | None:
        """None: cannot be told yet."""
        now = self._clock.unix_s()
        heard = self._heard.get(replica)
        if heard is not None and now - heard.at_unix_s <= self._lost_s:
            return heard.announce.incarnation == incarnation
        return False if self.complete else None

    def forget(self) -> None:
        """We heard nothing for a while, whoever lived: nobody is judged before heartbeats have had
        time to come again.
        """
        self._began_unix_s = self._clock.unix_s()
        self._heard.clear()

    def newly_lost(self) -> list[ReplicaId]:
        """Replicas silent for too long since the last time this was asked; they are forgotten by
        it.
        """
        now = self._clock.unix_s()
        lost = [
            replica
            for replica, heard in self._heard.items()
            if now - heard.at_unix_s > self._lost_s
        ]
        for replica in lost:
            del self._heard[replica]
        return lost

    def _compare(self, heard: _Heard) -> None:
        """Export how far the worker's clock is off, and say so now and then if that is far."""
        heard.offset.heard(heard.at_unix_s, heard.announce.at_unix_s)
        offset_s = heard.offset.offset_s
        if offset_s is None:
            return
        self._gauge.labels(heard.announce.replica).set(offset_s)
        if abs(offset_s) > OFFSET_LIMIT_S and heard.at_unix_s - heard.warned_unix_s >= WARN_EVERY_S:
            heard.warned_unix_s = heard.at_unix_s
            log.warning(
                "clock.offset",
                replica=heard.announce.replica,
                offset_s=offset_s,
                limit_s=OFFSET_LIMIT_S,
            )
