"""AdmissionCore: decides where each request goes next. Sans-IO: the service writes records and
sends offers. A request is *open* from when it is stored (or taken over) until it is held, relegated
or ended. At most one step of it is under way; the step's result comes back as an event, which leads
to the next step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, assert_never

import msgspec

from shared.core.admission.coming import Coming
from shared.core.admission.declines import Declines
from shared.core.load_view import LoadView
from shared.core.offer import as_offer
from shared.core.prefixes.known import KnownPrefixes
from shared.core.record.record import Apart
from shared.core.relegation.pool_work import PoolRoom
from shared.core.shared_room import Shares
from shared.core.tick import Tick
from shared.request_timeline import Neighbour, merged
from shared.routing.apart import then as goes_on
from shared.routing.pipeline import Router
from shared.schemas import (
    CertainAnswer,
    Digest,
    Offer,
    OfferAccepted,
    OfferDeclined,
    OfferNotReady,
    PoolDigest,
    Prefixes,
    Record,
)
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass

POOL_FULL = "too much best-effort work waits already"

# ---------------------------------------------------------------- events and actions


@dataclass(frozen=True, slots=True)
class Opened:
    """A waiting record that this admission owns: new, or recovered from a lost or drained replica.
    `told`: its client knows that it was received, so it is not refused because the pool is full.
    """

    record: Record
    told: bool = True


@dataclass(frozen=True, slots=True)
class Heard:
    digest: Digest


@dataclass(frozen=True, slots=True)
class Told:
    """All prefixes that a replica keeps, which its digests alone did not tell."""

    replica: ReplicaId
    prefixes: Prefixes


@dataclass(frozen=True, slots=True)
class Pooled:
    """The state of the best-effort pool."""

    digest: PoolDigest


@dataclass(frozen=True, slots=True)
class Lost:
    """The replica's worker was declared lost, or has a new incarnation."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Answered:
    """The offer of this attempt has an answer, which is certain."""

    key: RequestKey
    attempt: int
    replica: ReplicaId
    answer: CertainAnswer


@dataclass(frozen=True, slots=True)
class GaveWay:
    """A replica held the request, and relegated it before it began."""

    record: Record


@dataclass(frozen=True, slots=True)
class Gone:
    """The request is no longer ours: it ended, was cancelled, or another instance has it."""

    key: RequestKey


AdmissionEvent = Opened | Heard | Told | Pooled | Lost | Answered | GaveWay | Gone | Tick


@dataclass(frozen=True, slots=True)
class Place:
    """Name this replica in a record still at `attempt`, then offer it. Answered or Gone follows."""

    key: RequestKey
    attempt: int
    replica: ReplicaId
    incarnation: str
    hops_left: int  # as in the offer
    declined: str = ""  # why the replica asked before did not take it
    apart: Apart | None = None


class First(NamedTuple):
    """The first place of a request."""

    replica: ReplicaId
    incarnation: str
    hops_left: int  # as in the offer
    apart: Apart | None = None


@dataclass(frozen=True, slots=True)
class Relegate:
    """No replica can hold its SLO: put the request into the pool. Gone follows."""

    key: RequestKey
    reason: str
    declined: str = ""  # why the last replica did not take it
    # the requests whose prefills wait on the replicas that were asked
    neighbours: tuple[Neighbour, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """No replica holds its SLO, and it may not wait as best-effort. Gone follows."""

    key: RequestKey
    reason: str
    retry_after_s: float
    declined: str = ""  # why the last replica did not take it


AdmissionAction = Place | Relegate | Refuse


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hop_limit: int = 4  # offers of one request before it is best-effort
    retry_s: float = 0.1  # between looks at the digests while no replica can be offered anything
    # a request is relegated if for this long there is no replica that it can be offered to
    homeless_s: float = 10.0
    # open requests, shared by tenants; beyond this, new ones are refused with a Retry-After
    open_limit: int = 20_000
    # requests in the best-effort pool, shared alike by the tenants that have any; beyond this, new
    # requests that no replica can hold are refused
    pool_limit: int = 20_000


@dataclass(slots=True)
class _Open:
    record: Record
    since_unix_s: float
    attempt: int  # of the record, once the step under way is written
    told: bool  # its client knows that it was received
    tried: list[ReplicaId] = field(default_factory=list)
    hops: int = 0
    earliest_s: float = math.inf
    busy: bool = False  # a step is under way
    unasked: bool = False  # a replica was skipped because nobody planned it
    declined: str = ""  # why the last replica did not take it
    loads: tuple[Neighbour, ...] = ()  # of the replicas that declined


class AdmissionCore:
    """The open requests of one admission. All of its state can be rebuilt from the records."""

    def __init__(
        self, router: Router, rng: Random, settings: AdmissionSettings | None = None
    ) -> None:
        self._router = router
        self._rng = rng
        self._set = settings or AdmissionSettings()
        self._open: dict[RequestKey, _Open] = {}
        self._shares = Shares(self._set.open_limit)
        self._loads = LoadView()
        self._prefixes = KnownPrefixes()
        self._coming = Coming()
        self._room = PoolRoom(self._set.pool_limit)
        self._declines = Declines()
        self._retry_unix_s = math.inf

    @property
    def idle(self) -> bool:
        return not self._open

    @property
    def open(self) -> int:
        return len(self._open)

    def full(self, tenant: str, weight: float, receiving: int = 1) -> bool:
        """True if the open requests leave no room for `receiving` more of this tenant."""
        return not self._shares.fits(tenant, weight, receiving)

    def has(self, key: RequestKey) -> bool:
        return key in self._open

    def wake_at_unix_s(self) -> float | None:
        return None if self._retry_unix_s == math.inf else self._retry_unix_s

    def handle(self, event: AdmissionEvent, *, now_unix_s: float) -> list[AdmissionAction]:
        actions: list[AdmissionAction] = []
        match event:
            case Opened(record, told):
                known = self._open.get(record.key)
                # otherwise it is open already
                if known is None or record.attempt > known.attempt:
                    self._enter(_Open(record, now_unix_s, record.attempt, told))
                    self._step(record.key, now_unix_s, actions)
            case Heard(digest):
                if self._loads.received(digest, now_unix_s):
                    self._prefixes.heard(digest)
            case Told(replica, prefixes):
                self._prefixes.told(replica, prefixes)
            case Pooled(pool):
                self._room.heard(pool, now_unix_s)
            case Lost(replica):
                self._loads.gone(replica)
                self._prefixes.gone(replica)
            case GaveWay(record):
                self._declines.declined(record, now_unix_s)
            case Gone(key):
                self._leave(key)
            case Answered():
                self._on_answered(event, now_unix_s, actions)
            case Tick():
                pass
            case _:
                assert_never(event)
        if now_unix_s >= self._retry_unix_s:
            self._retry_unix_s = math.inf
            for key in [k for k, o in self._open.items() if not o.busy]:
                self._step(key, now_unix_s, actions)
        return actions

    def pick(self, offer: Offer, *, now_unix_s: float) -> First | None:
        """The first place of a request, to be stored with its record. Its load is debited there."""
        views = self._views(offer, now_unix_s)
        order = self._router(offer, views, self._rng)
        replica = next(iter(order), None)
        digest = None if replica is None else self._loads.raw(replica)
        if replica is None or digest is None:
            return None
        self._debit(offer, views[replica], now_unix_s)
        apart = self._apart(offer, views, replica, now_unix_s)
        return First(replica, digest.incarnation, self._hops_left(1, len(order)), apart)

    def _apart(
        self, offer: Offer, views: Mapping[ReplicaId, Digest], first: ReplicaId, now_unix_s: float
    ) -> Apart | None:
        """Where a request that is placed at `first` goes on. It counts there from now on."""
        then = goes_on(offer, views[first], views)
        if then is None:
            self._coming.gone(offer.key)
            return None
        self._coming.add(then.replica, offer, now_unix_s)
        return Apart(then.replica, views[first].kv_address)

    def _views(self, offer: Offer, now_unix_s: float) -> Mapping[ReplicaId, Digest]:
        """The replicas as they are for this offer."""
        views = self._coming.seen(self._loads.views(now_unix_s))
        return self._prefixes.seen(offer, views, now_unix_s)

    def _debit(self, offer: Offer, seen: Digest, now_unix_s: float) -> None:
        """The offer leaves for this replica, which has some of its prompt."""
        new_tokens = offer.prompt_tokens - seen.cached_tokens
        self._loads.placed(seen.replica, new_tokens, now_unix_s)
        self._prefixes.placed(seen.replica, offer, now_unix_s)

    @property
    def lacking(self) -> Sequence[ReplicaId]:
        """The replicas whose planners are to be asked for all their prefixes: Told follows."""
        return self._prefixes.lacking

    def _hops_left(self, hops: int, fresh: int) -> int:
        """The replicas that may be asked after the `hops`-th. `fresh`: not asked before it."""
        return max(min(self._set.hop_limit - hops, fresh - 1), 0)

    def shortest_backlog_s(self, *, now_unix_s: float) -> float:
        """The least backlog of a replica, 1 to 30 s: until then it is hardly worth asking again."""
        views = self._loads.views(now_unix_s).values()
        backlogs = [digest.backlog_s for digest in views if digest.accepting]
        return float(min(max(math.ceil(min(backlogs, default=1.0)), 1), 30))

    def refusable_s(self, record: Record, *, now_unix_s: float) -> float | None:
        """Seconds after which this new request may be sent again, if no replica can hold its SLO
        and it is refused for that. None: it is not, since the pool most likely serves it in time.
        """
        if not record.allow_relegation:
            return self.shortest_backlog_s(now_unix_s=now_unix_s)
        return self._room.retry_after_s(record, now_unix_s)

    def tries(self, record: Record, *, now_unix_s: float) -> bool:
        """True if a request that may be refused is to be offered; False: it is refused at once."""
        return self._declines.tries(record, now_unix_s)

    def placed(self, record: Record, *, told: bool, now_unix_s: float) -> None:
        """A record was stored with its first place: the offer is under way."""
        assert record.replica is not None
        self._enter(
            _Open(
                record, now_unix_s, record.attempt, told, tried=[record.replica], hops=1, busy=True
            )
        )

    def _enter(self, waiting: _Open) -> None:
        record = waiting.record
        self._leave(record.key)
        self._open[record.key] = waiting
        self._shares.take(record.key.partition(".")[0], record.weight)

    def _leave(self, key: RequestKey) -> None:
        if self._open.pop(key, None) is not None:
            self._shares.give(key.partition(".")[0])

    def _on_answered(
        self, event: Answered, now_unix_s: float, actions: list[AdmissionAction]
    ) -> None:
        key, replica, answer = event.key, event.replica, event.answer
        if isinstance(answer, OfferNotReady):
            self._loads.gone(replica)
        waiting = self._open.get(key)
        if waiting is None or waiting.attempt != event.attempt:
            return
        match answer:
            case OfferAccepted():
                self._leave(key)
                if not waiting.told:
                    self._declines.held(waiting.record)
                return
            case OfferDeclined():
                waiting.declined = answer.reason
                waiting.loads = merged((*waiting.loads, *answer.loads))
                if answer.earliest_s is not None:
                    waiting.earliest_s = min(waiting.earliest_s, answer.earliest_s)
            case OfferNotReady():  # it does not count as a hop; the replica may be tried again
                waiting.hops -= 1
                waiting.unasked = True
                waiting.declined = "nobody plans it now"
                waiting.tried.remove(replica)
            case _:
                assert_never(answer)
        waiting.busy = False
        self._step(key, now_unix_s, actions)

    def _step(self, key: RequestKey, now_unix_s: float, actions: list[AdmissionAction]) -> None:
        """Ask for the next place, or give the search up."""
        waiting = self._open[key]
        if waiting.busy:
            return
        record = waiting.record
        offer = as_offer(record, ServiceClass.STANDARD)
        views = self._views(offer, now_unix_s)
        order = self._router(offer, views, self._rng)
        fresh = [replica for replica in order if replica not in waiting.tried]
        if waiting.hops < self._set.hop_limit and fresh:
            replica = fresh[0]
            digest = self._loads.raw(replica)
            assert digest is not None
            waiting.tried.append(replica)
            waiting.hops += 1
            waiting.busy = True
            self._debit(offer, views[replica], now_unix_s)
            left = self._hops_left(waiting.hops, len(fresh))
            apart = self._apart(offer, views, replica, now_unix_s)
            place = waiting.attempt, replica, digest.incarnation, left, waiting.declined, apart
            actions.append(Place(key, *place))
            waiting.attempt += 1
            waiting.unasked = False
        elif (
            not waiting.hops or waiting.unasked
        ) and now_unix_s - waiting.since_unix_s < self._set.homeless_s:
            if not waiting.hops:
                waiting.tried.clear()
            self._retry_unix_s = min(self._retry_unix_s, now_unix_s + self._set.retry_s)
        else:
            waiting.busy = True
            reason = "no replica can hold its SLO" if waiting.hops else "no replica is up"
            full_s = None if waiting.told else self._room.retry_after_s(record, now_unix_s)
            if waiting.hops and not waiting.told:
                self._declines.declined(record, now_unix_s)
            if not record.allow_relegation:
                earliest_s = waiting.earliest_s if math.isfinite(waiting.earliest_s) else 1.0
                retry_s = min(max(math.ceil(earliest_s), 1), 30)
                actions.append(Refuse(key, reason, retry_s, waiting.declined))
            elif full_s is not None:
                reason = f"{reason}, and {POOL_FULL}"
                actions.append(Refuse(key, reason, full_s, waiting.declined))
            else:
                self._room.sent(record, now_unix_s)
                actions.append(Relegate(key, reason, waiting.declined, waiting.loads))

    def check(self) -> None:
        """Raises AssertionError unless every open request is on its way somewhere."""
        for key, waiting in self._open.items():
            # the first place is chosen before the record is stored, whatever the limit
            assert waiting.hops <= max(1, self._set.hop_limit), f"{key} was offered too often"
            assert waiting.busy or self._retry_unix_s < math.inf, f"{key} waits for nothing"
        self._loads.check()
        self._coming.check()
