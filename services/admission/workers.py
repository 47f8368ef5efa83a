"""Keeps track of the living workers, by their heartbeats, and of the offsets of their clocks."""

from collections.abc import Collection
from dataclasses import dataclass, field

import structlog

from services.admission.skew import Offset
from shared.clock import Clock
from shared.features import abilities, serves
from shared.schemas import Announce
from shared.telemetry.conventions import CLOCK_OFFSET, REPLICAS, REPLICAS_LOST
from shared.telemetry.instruments import Registry
from shared.vocabulary import MOST_REPLICAS, ReplicaId

log = structlog.get_logger()

# beyond, deadlines measured on another host are off by more than a token's pace allows
OFFSET_LIMIT_S = 0.010
LATE_S = 0.6  # a heartbeat comes every 0.5 s (announce_s)
WARN_EVERY_S = 60.0
KINDS_LIMIT = 256  # models, and sets of abilities, that are remembered
REPLICA_LIMIT = 256  # replicas with a gauge of their own; further ones share one
RETURN_S = 300.0  # as AdmissionConfig.return_s


@dataclass(slots=True)
class _Known:
    announce: Announce
    at_unix_s: float  # when it was received, by our clock
    # of this incarnation, since another process has another clock
    offset: Offset = field(default_factory=Offset)
    warned_unix_s: float = float("-inf")


class Workers:
    """The newest announcement of each replica, and when it was received."""

    def __init__(
        self, clock: Clock, lost_s: float, metrics: Registry, return_s: float = RETURN_S
    ) -> None:
        self._clock = clock
        self.lost_s, self._return_s = lost_s, return_s
        self._born_unix_s = self._began_unix_s = clock.unix_s()
        self._known: dict[ReplicaId, _Known] = {}
        # model, features and adapters of every replica since we began
        self.kinds: set[tuple[str, frozenset[str]]] = set()
        # the newest announcement of each model since we began, also of a worker that is lost
        self._last: dict[str, Announce] = {}
        self._newest: Announce | None = None  # of all
        # the model of each replica, also of a lost one, and when it was last heard
        self._heard: dict[ReplicaId, tuple[str, float]] = {}
        text = (
            "Clock of admission minus clock of the worker, seconds,"
            " the least latency of a heartbeat included."
        )
        self._gauge = metrics.gauge(CLOCK_OFFSET, text, ("replica",), {"replica": REPLICA_LIMIT})

        self._lost = metrics.counter(
            REPLICAS_LOST, "Replicas declared lost: their worker was silent, or is a new one."
        ).labels()
        living = metrics.gauge(REPLICAS, "Replicas whose worker is heard.").labels()
        metrics.before_scrape(lambda: living.set(len(self.living())))

    @property
    def models(self) -> set[str]:
        """The models of replicas that live or may come back; if there is none, of all so far."""
        return self._present() or set(self._last)

    def has_left(self, model: str) -> bool:
        """True if no replica of this model has lived for `return_s`, though others do."""
        if not self.complete or self._clock.unix_s() - self._born_unix_s <= self._return_s:
            return False
        return bool(self.living()) and model not in self._present()

    def _present(self) -> set[str]:
        now = self._clock.unix_s()
        return {model for model, at in self._heard.values() if now - at <= self._return_s}

    def received(self, announce: Announce) -> bool:
        """Note an announcement. True: a new incarnation, so the old one's requests are stranded."""
        before, now = self._known.get(announce.replica), self._clock.unix_s()
        if before is not None and before.announce.at_unix_s > announce.at_unix_s:
            return False
        if before is None and len(self._known) >= MOST_REPLICAS:
            return False
        if len(self.kinds) < KINDS_LIMIT:  # a worker could announce another one each time
            self.kinds.add((announce.model, abilities(announce)))
        if announce.model in self._last or len(self._last) < KINDS_LIMIT:
            self._last[announce.model] = announce
        self._newest = announce
        self._note(announce, now)
        if before is not None and before.announce.incarnation == announce.incarnation:
            before.announce, before.at_unix_s = announce, now
            self._compare(before)
            return False
        known = self._known[announce.replica] = _Known(announce, now)
        if before is not None:
            known.warned_unix_s = before.warned_unix_s
            self._count_lost(before)
        self._compare(known)
        return before is not None

    def living(self) -> list[Announce]:
        now = self._clock.unix_s()
        return [h.announce for h in self._known.values() if now - h.at_unix_s <= self.lost_s]

    @property
    def replicas(self) -> set[ReplicaId]:
        return set(self._known)

    def any(self, model: str = "", needs: Collection[str] = ()) -> Announce | None:
        """The living worker of this model ("": any) that meets the needs, and of those the one with
        the longest context.
        """
        return max(
            (a for a in self.living() if serves(a, model, needs)),
            key=lambda a: a.context_tokens,
            default=None,
        )

    def last(self, model: str = "") -> Announce | None:
        """The newest announcement of this model ("": of any), also of a worker that is lost."""
        return self._last.get(model) if model else self._newest

    @property
    def complete(self) -> bool:
        """True once we have listened so long that a worker without a heartbeat does not live."""
        return self._clock.unix_s() - self._began_unix_s > self.lost_s

    def lives(self, replica: ReplicaId, incarnation: str) -> bool | None:
        """True if this incarnation of the worker lives; None if that is not known yet."""
        now = self._clock.unix_s()
        known = self._known.get(replica)
        if known is not None and now - known.at_unix_s <= self.lost_s:
            return known.announce.incarnation == incarnation
        return False if self.complete else None

    def forget(self) -> None:
        """Nothing was received for a while: nobody is judged until heartbeats can come again."""
        self._began_unix_s = self._clock.unix_s()
        self._known.clear()

    def late(self) -> list[str]:
        """The incarnations whose heartbeat is late."""
        now = self._clock.unix_s()
        return [k.announce.incarnation for k in self._known.values() if now - k.at_unix_s > LATE_S]

    def lose(self, gone: Collection[str]) -> None:
        """These incarnations are gone: they count as lost, as after a long silence."""
        for known in self._known.values():
            if known.announce.incarnation in gone:
                known.at_unix_s = float("-inf")

    def newly_lost(self) -> list[ReplicaId]:
        """Replicas silent for too long since the last call, which are forgotten now."""
        now = self._clock.unix_s()
        lost = [
            replica for replica, known in self._known.items() if now - known.at_unix_s > self.lost_s
        ]
        for replica in lost:
            self._count_lost(self._known.pop(replica))
        return lost

    def _count_lost(self, known: _Known) -> None:
        """A worker that drained has left in order."""
        if not known.announce.draining:
            self._lost.add()

    def _note(self, announce: Announce, now: float) -> None:
        self._heard[announce.replica] = announce.model, now
        if len(self._heard) > MOST_REPLICAS:
            self._heard = {
                replica: (model, at)
                for replica, (model, at) in self._heard.items()
                if now - at <= self._return_s
            }

    def _compare(self, known: _Known) -> None:
        """Export the offset of the worker's clock, and log a large one every WARN_EVERY_S."""
        known.offset.heard(known.at_unix_s, known.announce.at_unix_s)
        offset_s = known.offset.offset_s
        if offset_s is None:
            return
        self._gauge.labels(known.announce.replica).set(offset_s)
        if abs(offset_s) > OFFSET_LIMIT_S and known.at_unix_s - known.warned_unix_s >= WARN_EVERY_S:
            known.warned_unix_s = known.at_unix_s
            log.warning(
                "clock.offset",
                replica=known.announce.replica,
                offset_s=offset_s,
                limit_s=OFFSET_LIMIT_S,
            )
