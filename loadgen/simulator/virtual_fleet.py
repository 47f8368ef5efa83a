"""A fleet in virtual time: records in a dict, the cores of admission and relegation, and replicas.
Each step takes its stated latency.

The fleet does what the live shells do, in the same order (services/admission, services/relegation,
shared/placing/place.py). No message is lost, so every compare-and-set succeeds and no offer is ever
in doubt. Workers may die: requests in their logs go on elsewhere once the death is seen.

Where digests take time to travel, they are published as often as live ones. Where they take none,
the fleet reads one only when a core needs it: when a request arrives or waits for a place, and the
last digest is older than that interval.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, assert_never

from msgspec import structs

from loadgen.simulator.late_prefixes import LatePrefixes
from loadgen.simulator.latency import Hop, Latency, Route
from loadgen.simulator.moves import Moves
from loadgen.simulator.timeline import Alarm, Timeline
from loadgen.simulator.virtual_replica import VirtualReplica
from shared.core.admission import admission
from shared.core.admission.admission import AdmissionCore, AdmissionEvent, AdmissionSettings
from shared.core.offer import as_offer
from shared.core.record import record as life
from shared.core.relegation import relegation
from shared.core.relegation.relegation import RelegationCore, RelegationEvent, RelegationSettings
from shared.core.tick import Tick
from shared.prefix import CHAIN_TOKENS, Chain
from shared.routing.pipeline import Router
from shared.schemas import (
    AttemptOver,
    Body,
    Digest,
    Hold,
    OfferAccepted,
    OfferAnswer,
    OfferDeclined,
    OfferInDoubt,
    OfferNotReady,
    Record,
)
from shared.vocabulary import RecordState, ReplicaId, RequestKey, ServiceClass

ADMISSION, RELEGATION = "admission", "relegation"  # owners of records
# From a worker's death until its requests have their next place: docs/reliability.md, "What bounds
# the silence".
SEEN_S = 1.1
LOST_LIMIT = 5  # as services/admission/config.py
STAYS_S, ANNOUNCE_S = 8.0, 0.5  # of a worker that leaves: as services/worker/config.py has them


class VirtualFleet:
    """The fleet without its replicas, which `start` adds. `rng` draws for the router, `latency_rng`
    draws latencies. `on_end` is called once with each record that has ended.
    """

    def __init__(
        self,
        timeline: Timeline,
        latency: Latency,
        router: Router,
        rng: Random,
        latency_rng: Random,
        on_end: Callable[[Record], None],
        *,
        admission_settings: AdmissionSettings | None = None,
        relegation_settings: RelegationSettings | None = None,
        keep_times: bool = False,
        prefixes_late_s: float = 0.0,
    ) -> None:
        self._timeline, self._latency, self._latency_rng = timeline, latency, latency_rng
        self._on_end, self._keep_times = on_end, keep_times
        self._on_demand = latency.digest.median_s == 0.0  # digests are read when they are needed
        self._refreshing = False  # a request waits, so the next refresh is on the timeline
        self._late = LatePrefixes(prefixes_late_s) if prefixes_late_s else None
        self._digest_at_s: dict[str, float] = {}  # of each replica's last digest
        self._admission = AdmissionCore(router, rng, admission_settings)
        self._relegation = RelegationCore(relegation_settings)
        self._admission_alarm = Alarm(
            timeline, self._admission.wake_at_unix_s, lambda: self._admit(Tick())
        )
        self._relegation_alarm = Alarm(
            timeline, self._relegation.wake_at_unix_s, lambda: self._pool(Tick())
        )
        self._replicas: dict[str, VirtualReplica] = {}
        self._offers: dict[tuple[str, ReplicaId], Route] = {}  # by sender and replica
        self._digests: dict[ReplicaId, Route] = {}
        self._records: dict[RequestKey, Record] = {}
        self._bodies: dict[RequestKey, Body] = {}
        self._chains: dict[RequestKey, Chain] = {}
        self._moves = Moves(timeline)
        self.offloaded = 0
        self.moved = 0  # times a request lost its replica
        self.drained = 0  # times a replica that left handed a request on
        self.times: dict[RequestKey, array[float]] = {}

    def start(self, replicas: Sequence[VirtualReplica]) -> None:
        """Add the replicas. Every digest is known at once; later ones are evenly spread."""
        every_s = self._latency.digest_every_s
        for i, replica in enumerate(replicas):
            self._replicas[replica.id] = replica
            for sender in (ADMISSION, RELEGATION):
                self._offers[sender, replica.id] = self._route(self._latency.offer)
            self._digests[replica.id] = self._route(self._latency.digest)
            self._receive_digest(replica.digest())
            if not self._on_demand:
                self._timeline.after(
                    every_s * (i + 1) / len(replicas), self._publish_digest, replica
                )

    def fail(self, replica: VirtualReplica) -> None:
        """The worker of this replica dies now."""
        del self._replicas[replica.id]
        attempts = replica.die()
        self._timeline.after(SEEN_S, self._lost, replica, attempts)

    def drain(self, replica: VirtualReplica, gone: Callable[[], None]) -> None:
        """The worker of this replica leaves: it takes no new requests, its planner moves those that
        it holds (shared/core/leaving.py), and what is left at the end it hands back at once. `gone`
        is called once it has left.
        """
        self._leave(replica, self._timeline.now_s + STAYS_S, gone)

    def _leave(self, replica: VirtualReplica, leaves_s: float, gone: Callable[[], None]) -> None:
        """One heartbeat of a replica that leaves."""
        if replica.worker.held and self._timeline.now_s < leaves_s:
            replica.leave(leaves_s, self._receivers(replica))
            self._receive_digest(replica.digest())
            self._timeline.after(ANNOUNCE_S, self._leave, replica, leaves_s, gone)
            return
        del self._replicas[replica.id]
        self._receive_digest(structs.replace(replica.digest(), accepting=False))
        attempts = replica.die("drained")
        for reply in replica.unanswered():
            reply(OfferNotReady(reason="its worker drains"))
        for over in attempts:
            record = self._records.get(over.key)
            if record is not None and (record.replica, record.attempt) == (
                replica.id,
                over.attempt,
            ):
                self.over(replica, over)
        gone()

    def _receivers(self, leaving: VirtualReplica) -> int:
        """The number of replicas that could go on with the requests of this one."""
        return sum(
            other is not leaving
            and other.announce.model == leaving.announce.model
            and other.announce.leaves_unix_s is None
            for other in self._replicas.values()
        )

    def _lost(self, replica: VirtualReplica, attempts: Sequence[AttemptOver]) -> None:
        """The death is seen: offers that nobody answered go elsewhere, and so do the attempts that
        the log has, as in the live sweep.
        """
        self._admit(admission.Lost(replica.id))
        for reply in replica.unanswered():
            reply(OfferNotReady(reason="its worker died"))
        for over in attempts:
            record = self._records.get(over.key)
            if record is None or (record.replica, record.attempt) != (replica.id, over.attempt):
                continue  # it was not answered, and has gone elsewhere
            self.moved += 1
            after = self._write(
                life.lost(
                    record,
                    record,
                    ADMISSION,
                    self._timeline.now_s,
                    resume=over.resume,
                    relegated=over.relegated,
                    limit=LOST_LIMIT,
                )
            )
            if after.state == RecordState.RELEGATED:
                self._after(self._latency.hint, self._hinted, after.key)
            elif after.verdict is None:
                self._admit(admission.Opened(after))

    def _route(self, hop: Hop) -> Route:
        return Route(self._timeline, hop, self._latency_rng)

    def _after(self, hop: Hop, call: Callable[..., None], *args: Any) -> None:
        self._timeline.after(hop.draw_s(self._latency_rng), call, *args)

    # ------------------------------------------------------------ the store of the replicas

    def record(self, key: RequestKey) -> Record:
        return self._records[key]

    def body(self, key: RequestKey) -> Body:
        return self._bodies[key]

    def chain(self, key: RequestKey) -> Chain:
        return self._chains.get(key, ())

    def token_times(self, key: RequestKey) -> "array[float]":
        return self.times[key]

    def computed(self, replica: VirtualReplica, key: RequestKey, hashes: int) -> None:
        """So much of a request that goes on elsewhere is computed at this replica: it leaves."""
        self._moves.computed(key, replica.id, hashes)

    def fetch(self, replica: VirtualReplica, hold: Hold, then: Callable[[Hold, int], None]) -> None:
        """The KV of this request comes here from where it was, unless it is on its way already."""
        key = hold.key
        if not self._moves.under_way(key, replica.id):
            at = self._records[key].kv if hold.fetch_s else None
            source = None if at is None else self._replicas.get(at.replica)
            if at is None or source is None:
                then(hold, 0)
                return
            chain = self.chain(key)[: at.tokens // CHAIN_TOKENS]
            self._move(key, source.id, replica)
            self._moves.computed(key, source.id, source.worker.prefixes.match(chain))
        self._moves.wait(key, hold.fetch_s, partial(then, hold))

    def _move(self, key: RequestKey, source: ReplicaId, target: VirtualReplica) -> None:
        there = target.worker.prefixes.match(self.chain(key))
        self._moves.begin(key, source, target.announce, there)

    def _fetch_ahead(self, record: Record) -> None:
        """The replica where this request is to go on hears that its KV will come."""
        key, first = record.key, record.replica
        assert first is not None
        if not self._moves.under_way(key, first):  # it is where it was to go on
            self._moves.forget(key)
        if record.then is not None and (target := self._replicas.get(record.then)) is not None:
            self._move(key, first, target)

    def over(self, replica: VirtualReplica, over: AttemptOver) -> None:
        """Settle an attempt, as admission does."""
        record = self._records[over.key]
        self.offloaded += over.why == "offloaded"
        self.drained += over.why == "drained"
        after = self._write(life.settled(record, over, ADMISSION, self._timeline.now_s))
        if after.state == RecordState.RELEGATED:
            self._after(self._latency.hint, self._hinted, after.key)
        elif after.verdict is None:
            self._admit(admission.Opened(after))

    # ------------------------------------------------------------ admission

    def receive(self, record: Record, body: Body, chain: Chain = ()) -> None:
        """Take in a new request: choose its first place before its record is written, or refuse it
        if too many are open.
        """
        now_s = self._timeline.now_s
        if self._on_demand:
            self._refresh()
        self.times[record.key] = array("d")
        if self._admission.full(record.key.partition(".")[0], record.weight):
            refused = life.refused(
                record,
                ADMISSION,
                now_s,
                message="too many requests are under way",
                retry_after_s=1.0,
            )
            assert refused is not None
            del self.times[record.key]
            self._on_end(refused)
            return
        picked = self._admission.pick(as_offer(record, ServiceClass.STANDARD), now_unix_s=now_s)
        self._bodies[record.key] = body
        if chain:
            self._chains[record.key] = chain
        hops_left = 0
        if picked is not None:
            replica, incarnation, hops_left, apart = picked
            placed = life.placed(
                record, ADMISSION, replica, incarnation, attempt=record.attempt, apart=apart
            )
            assert placed is not None, "a new record can be placed"
            record = placed
        self._after(self._latency.create, self._created, record, now_s, hops_left)

    def _created(self, record: Record, received_s: float, hops_left: int) -> None:
        self._records[record.key] = record
        if record.replica is None:
            self._admit(admission.Opened(record))
        else:
            self._admission.placed(record, told=True, now_unix_s=received_s)
            self._fetch_ahead(record)
            self._offer(record, self._admission_answered, hops_left)

    def _admit(self, event: AdmissionEvent) -> None:
        for action in self._admission.handle(event, now_unix_s=self._timeline.now_s):
            self._after(self._latency.change, self._admission_step, action)
        self._admission_alarm.reset()
        self._refresh_later()

    def _admission_step(self, action: admission.AdmissionAction) -> None:
        record = self._records[action.key]
        match action:
            case admission.Place(_, attempt, replica, incarnation, hops_left, _, apart):
                placed = life.placed(
                    record, ADMISSION, replica, incarnation, attempt=attempt, apart=apart
                )
                record = self._write(placed)
                self._fetch_ahead(record)
                self._offer(record, self._admission_answered, hops_left)
                return
            case admission.Relegate():
                self._write(life.relegated(record, ADMISSION))
                self._after(self._latency.hint, self._hinted, record.key)
            case admission.Refuse(_, reason, retry_after_s):
                now_s = self._timeline.now_s
                self._write(
                    life.refused(
                        record, ADMISSION, now_s, message=reason, retry_after_s=retry_after_s
                    )
                )
            case _:
                assert_never(action)
        self._admit(admission.Gone(action.key))

    def _admission_answered(self, record: Record, answer: OfferAnswer) -> None:
        assert record.replica is not None
        assert not isinstance(answer, OfferInDoubt), f"{record.key}: every offer here is answered"
        self._admit(admission.Answered(record.key, record.attempt, record.replica, answer))

    # ------------------------------------------------------------ relegation

    def _hinted(self, key: RequestKey) -> None:
        record = self._records.get(key)
        if record is not None and record.state == RecordState.RELEGATED:
            self._pool(relegation.Queued(record))

    def _pool(self, event: RelegationEvent) -> None:
        for action in self._relegation.handle(event, now_unix_s=self._timeline.now_s):
            self._after(self._latency.change, self._relegation_step, action)
        self._relegation_alarm.reset()
        self._refresh_later()

    def _relegation_step(self, action: relegation.RelegationAction) -> None:
        record = self._records[action.key]
        match action:
            case relegation.Place(_, replica, incarnation, service_class):
                drawn = life.drawn(record, RELEGATION, replica, incarnation, service_class)
                self._offer(self._write(drawn), self._relegation_answered)
            case relegation.Expire(key):
                self._write(life.expired(record, self._timeline.now_s))
                self._pool(relegation.Gone(key))
            case _:
                assert_never(action)

    def _relegation_answered(self, record: Record, answer: OfferAnswer) -> None:
        assert record.replica is not None
        match answer:
            case OfferAccepted():
                self._pool(relegation.Taken(record.key))
            case OfferDeclined() | OfferNotReady():
                self._after(self._latency.change, self._back_in_pool, record)
            case OfferInDoubt():
                raise AssertionError(f"{record.key}: every offer here is answered")
            case _:
                assert_never(answer)

    def _back_in_pool(self, record: Record) -> None:
        assert record.replica is not None
        self._write(life.declined(self._records[record.key], RELEGATION, attempt=record.attempt))
        self._pool(relegation.Declined(record.key, record.replica))

    # ------------------------------------------------------------ admission and relegation

    def _offer(
        self, record: Record, answered: Callable[[Record, OfferAnswer], None], hops_left: int = 0
    ) -> None:
        assert record.replica is not None
        replica = self._replicas.get(record.replica)
        offer = as_offer(record, record.service_class, hops_left=hops_left)
        if replica is None:  # its planner finds no worker
            self._timeline.after(
                SEEN_S, answered, record, OfferNotReady(reason="its worker is dead")
            )
            return
        route = self._offers[record.owner, record.replica]
        route.send(replica.offer, offer, lambda answer: answered(record, answer))

    def _write(self, record: Record | None) -> Record:
        """Store a record. Every step applies: there is no other writer."""
        assert record is not None
        self._records[record.key] = record
        if record.verdict is not None:
            del self._records[record.key], self._bodies[record.key]
            self._chains.pop(record.key, None)
            self._moves.forget(record.key)
            if not self._keep_times:
                del self.times[record.key]
            self._on_end(record)
        return record

    def _refresh_later(self) -> None:
        """While a request waits for a place or in the pool, refresh digests at the pace of live
        ones.
        """
        if (
            self._on_demand
            and not self._refreshing
            and (self._relegation.waiting or self._admission.wake_at_unix_s() is not None)
        ):
            self._refreshing = True
            self._timeline.after(self._latency.digest_every_s, self._refresh_on)

    def _refresh_on(self) -> None:
        self._refreshing = False
        self._refresh()
        self._refresh_later()

    def _refresh(self) -> None:
        """Read a digest of every replica whose last one is too old."""
        now_s = self._timeline.now_s
        for replica in self._replicas.values():
            if now_s - self._digest_at_s.get(replica.id, -1.0) >= self._latency.digest_every_s:
                self._receive_digest(replica.digest())

    def _publish_digest(self, replica: VirtualReplica) -> None:
        if self._replicas.get(replica.id) is not replica:
            return
        self._digests[replica.id].send(self._receive_digest, replica.digest())
        self._timeline.after(self._latency.digest_every_s, self._publish_digest, replica)

    def _receive_digest(self, digest: Digest) -> None:
        self._digest_at_s[digest.replica] = digest.at_unix_s
        if self._late is not None:
            digest = self._late.of(digest)
        self._admit(admission.Heard(digest))
        for replica in self._admission.lacking:
            self._admit(admission.Told(replica, self._replicas[replica].core.kept.all()))
        self._pool(relegation.Heard(digest))
        for replica in self._relegation.lacking:
            self._pool(relegation.Told(replica, self._replicas[replica].core.kept.all()))

    def check(self) -> None:
        """Raises AssertionError unless every core's books balance."""
        self._admission.check()
        self._relegation.check()
        for replica in self._replicas.values():
            replica.check()
