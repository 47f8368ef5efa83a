"""RelegationCore: decides which relegated request goes to which replica with surplus.

The order is importance, the tenant given least, then age (pool.py); what the replica has of a
prompt counts as age (nearest.py). A request waits for a replica of its model that meets its needs;
one whose SLO has become attainable goes back as standard. The stored records are the queue;
RelegationCore has a working copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple, assert_never

import msgspec

from shared.core.load_view import STALE_S, TOKEN_S, LoadView
from shared.core.prefixes.known import KnownPrefixes
from shared.core.relegation.nearest import Nearest
from shared.core.relegation.pool import SWEEP_MIN, Order, Shares, lane_of
from shared.core.relegation.pool_rate import PoolRate
from shared.core.relegation.pool_work import PoolWork
from shared.core.tick import Tick
from shared.features import serves
from shared.schemas import Digest, PoolDigest, Prefixes, Record
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass


@dataclass(frozen=True, slots=True)
class Listed:
    """All relegated records."""

    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class Queued:
    record: Record


@dataclass(frozen=True, slots=True)
class Heard:
    digest: Digest


@dataclass(frozen=True, slots=True)
class Told:
    """All prefixes that a replica keeps, which its digests alone did not tell."""

    replica: ReplicaId
    prefixes: Prefixes


@dataclass(frozen=True, slots=True)
class Taken:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Declined:
    key: RequestKey
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Gone:
    """The request ended, was cancelled, or is no longer relegated."""

    key: RequestKey


RelegationEvent = Listed | Queued | Heard | Told | Taken | Declined | Gone | Tick


@dataclass(frozen=True, slots=True)
class Place:
    """Name the place in the record, then offer the request. Taken, Declined or Gone follows."""

    key: RequestKey
    replica: ReplicaId
    incarnation: str
    service_class: ServiceClass


@dataclass(frozen=True, slots=True)
class Expire:
    key: RequestKey


RelegationAction = Place | Expire

# Requests per digest that are looked at although their SLO is not attainable there, and requests
# that are looked up among the prefixes kept there for each that is handed out (5 us each).
LOOKS, LOOKED_UP = 256, 16
# A replica without any standard request is handed prompts for so many seconds at once.
ALONE_S = 0.1
ALONE_MOST = 64  # requests that it is handed so
KEPT = 0.25  # the part of its KV, and of its free slots, that stays free for others


class RelegationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    per_digest: int = 2  # requests handed to a busy replica before its next digest
    declined_s: float = 0.5  # a replica that declined is handed nothing for this long
    # an SLO counts as attainable if this many times the predicted time is left
    promote_margin: float = 2.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    record: Record
    # begun by this instant where no prefill waits, the request meets its next deadline; -inf: never
    hopeful_until_unix_s: float


class _AtOnce(NamedTuple):
    """The most that a replica is handed at once, where that is more than `per_digest`."""

    requests: int
    tokens: float  # of prompts, and of output made before


def _has_best_effort_alone(digest: Digest) -> bool:
    """True if the replica takes best-effort requests and has no standard one."""
    return digest.accepting and digest.surplus and not digest.running and not digest.waiting


class RelegationCore:
    """The pool of the lease's holder. A request is *busy* from an action to its result's event."""

    def __init__(self, settings: RelegationSettings | None = None) -> None:
        self._set = settings or RelegationSettings()
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._busy: dict[RequestKey, ReplicaId | None] = {}  # None if the request expires
        self._shares = Shares()
        self._order = Order(self._shares)  # the requests not busy
        # the requests of `_order` whose SLO may still be attainable somewhere
        self._hopeful = Order(self._shares)
        # heap; an entry is void if its request has left or is busy
        self._expiries: list[tuple[float, RequestKey]] = []
        self._loads = LoadView()
        self._prefixes = KnownPrefixes()
        self._not_before_unix_s: dict[ReplicaId, float] = {}
        self._work = PoolWork()
        self._rates: dict[str, PoolRate] = {}  # by model
        self._heard_unix_s: dict[str, float] = {}  # when a digest of the model came last

    @property
    def idle(self) -> bool:
        return not self._busy

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def digest(self, *, now_unix_s: float) -> PoolDigest:
        """The work in the pool, and the speed at which the fleet takes it."""
        idle_tokens_s = dict.fromkeys(self._rates, 0.0)
        for digest in self._loads.views(now_unix_s).values():
            if digest.accepting and digest.model in idle_tokens_s:
                idle_tokens_s[digest.model] += 1.0 / digest.token_s
        rates = {model: self._rates[model].tokens_s(idle_tokens_s[model]) for model in self._rates}
        return PoolDigest(
            tokens_s=sum(rates.values()),
            lanes=self._work.lanes(),
            rates=rates if len(rates) > 1 else {},
        )

    @property
    def lacking(self) -> Sequence[ReplicaId]:
        """The replicas whose planners are to be asked for all their prefixes: Told follows."""
        return self._prefixes.lacking

    def wake_at_unix_s(self) -> float | None:
        """The next expiry. Everything else happens when a digest comes."""
        while self._expiries and not self._expires(*self._expiries[0]):
            heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def handle(self, event: RelegationEvent, *, now_unix_s: float) -> list[RelegationAction]:
        actions: list[RelegationAction] = []
        match event:
            case Listed(records):
                self._list(records, now_unix_s)
                self._prefixes.keep(self._loads.views(now_unix_s))
            case Queued(record):
                if record.key not in self._waiting:
                    self._enter(record, now_unix_s)
            case Heard(digest):
                self._wait(digest, now_unix_s)
                if self._loads.received(digest, now_unix_s):
                    self._prefixes.heard(digest)
                    if now_unix_s >= self._not_before_unix_s.get(digest.replica, 0.0):
                        self._hand_out(digest.replica, now_unix_s, actions)
            case Told(replica, prefixes):
                self._prefixes.told(replica, prefixes)
            case Taken(key) | Gone(key):
                if key in self._waiting:
                    if isinstance(event, Taken):
                        self._took(key)
                    self._leave(key, now_unix_s)
            case Declined(key, replica):
                self._not_before_unix_s = {
                    r: at for r, at in self._not_before_unix_s.items() if at > now_unix_s
                }
                self._not_before_unix_s[replica] = now_unix_s + self._set.declined_s
                if key in self._busy:
                    del self._busy[key]
                    self._offer_again(self._waiting[key], now_unix_s)
            case Tick():
                pass
            case _:
                assert_never(event)
        while self._expiries and self._expiries[0][0] <= now_unix_s:
            leaves_unix_s, key = heappop(self._expiries)
            if self._expires(leaves_unix_s, key):
                self._make_busy(key)
                actions.append(Expire(key))
        return actions

    def check(self) -> None:
        """Raises AssertionError unless the pool's parts agree."""
        assert self._busy.keys() <= self._waiting.keys(), "a busy request does not wait"
        free = self._waiting.keys() - self._busy.keys()
        assert self._order.keys() == free, "the order and the pool differ"
        assert self._hopeful.keys() <= free, "a request may be promoted that is not free"
        expiring = {
            key for expiry in self._expiries if self._expires(*expiry) for key in expiry[1:]
        }
        assert expiring == free, "a request that waits never expires"
        self._loads.check()

    # ------------------------------------------------------------ the requests that wait

    def _list(self, records: Sequence[Record], now_unix_s: float) -> None:
        listed = {record.key for record in records}
        # sorted, since the last to leave says where its tenant's next one begins
        for key in sorted(k for k in self._waiting if k not in listed and k not in self._busy):
            self._leave(key, now_unix_s)
        for record in records:
            known = self._waiting.get(record.key)
            if known is None:
                self._enter(record, now_unix_s)
            elif record.key not in self._busy and record != known.record:
                self._leave(record.key, now_unix_s)
                self._enter(record, now_unix_s)

    def _enter(self, record: Record, now_unix_s: float) -> None:
        waiting = self._waiting[record.key] = _Waiting(record, self._hopeful_until_unix_s(record))
        self._shares.enter(lane_of(record), now_unix_s)
        self._work.add(record)
        for rate in self._rates.values():
            rate.entered(record)
        self._offer_again(waiting, now_unix_s)

    def _offer_again(self, waiting: _Waiting, now_unix_s: float) -> None:
        record = waiting.record
        self._order.add(record)
        if now_unix_s <= waiting.hopeful_until_unix_s:
            self._hopeful.add(record)
        heappush(self._expiries, (record.leaves_pool_unix_s, record.key))
        if len(self._expiries) > 2 * len(self._waiting) + SWEEP_MIN:
            self._expiries = [
                (w.record.leaves_pool_unix_s, key)
                for key, w in self._waiting.items()
                if key not in self._busy
            ]
            heapify(self._expiries)

    def _make_busy(self, key: RequestKey, replica: ReplicaId | None = None) -> None:
        self._busy[key] = replica
        self._order.discard(key)
        self._hopeful.discard(key)

    def _leave(self, key: RequestKey, now_unix_s: float) -> None:
        self._make_busy(key)
        del self._busy[key]
        record = self._waiting.pop(key).record
        self._shares.leave(lane_of(record), now_unix_s)
        self._work.add(record, -1)

    def _expires(self, leaves_unix_s: float, key: RequestKey) -> bool:
        """True if this entry of the heap is not void."""
        waiting = self._waiting.get(key)
        return (
            waiting is not None
            and key not in self._busy
            and waiting.record.leaves_pool_unix_s == leaves_unix_s
        )

    # ------------------------------------------------------------ the next request

    def _wait(self, digest: Digest, now_unix_s: float) -> None:
        """Time passes. It counts as waited unless this replica has room that no request suits."""
        model = digest.model
        passed_s = min(now_unix_s - self._heard_unix_s.get(model, -math.inf), STALE_S)
        self._heard_unix_s[model] = now_unix_s
        if model not in self._rates:
            self._rates[model] = PoolRate()
        suits = self._order.of(model) and (
            not digest.surplus
            or self._order.first(lambda wants: serves(digest, *wants)) is not None
        )
        if suits or any(self._model_of(replica) in ("", model) for replica in self._busy.values()):
            self._rates[model].waited(passed_s)

    def _model_of(self, replica: ReplicaId | None) -> str:
        """The model of a replica; empty: it is not known."""
        digest = None if replica is None else self._loads.raw(replica)
        return "" if digest is None else digest.model

    def _took(self, key: RequestKey) -> None:
        """A replica took it: that is work done at the speed of its model."""
        model = self._model_of(self._busy.get(key))
        if model in self._rates:
            self._rates[model].took(self._waiting[key].record)

    def _hand_out(
        self, replica: ReplicaId, now_unix_s: float, actions: list[RelegationAction]
    ) -> None:
        """Place the first requests in order on a replica with surplus, those whose SLO is
        attainable there as standard. A tenant is charged for each, even if it is declined: a
        request that no replica takes must not stay first.
        """
        digest = self._loads.view(replica)
        assert digest is not None
        if not digest.accepting or not (digest.surplus or not digest.waiting):
            return
        order = self._order if digest.surplus else self._hopeful
        alone = self._alone(replica, digest, now_unix_s)
        most = min(max(self._set.per_digest, alone.requests), digest.free_slots)
        handed = handed_tokens = 0
        looks, too_late_here = LOOKS, []
        nearest = Nearest(partial(self._found, replica, now_unix_s), LOOKED_UP * most, now_unix_s)
        while (
            handed < most
            and (handed < self._set.per_digest or handed_tokens < alone.tokens)
            and looks > 0
            and (key := order.first(lambda wants: serves(digest, *wants))) is not None
        ):
            if digest.surplus:
                key = nearest.before(self._waiting[key].record, self._line)
            waiting = self._waiting[key]
            record = waiting.record
            ahead_s = digest.backlog_s + (handed_tokens * digest.token_s if alone.tokens else 0.0)
            ready_unix_s = now_unix_s + self._set.promote_margin * ahead_s
            attainable = not digest.waiting and ready_unix_s <= waiting.hopeful_until_unix_s
            if not attainable and not digest.surplus:
                looks -= 1
                self._hopeful.discard(key)
                if now_unix_s <= waiting.hopeful_until_unix_s:
                    too_late_here.append(record)
                continue
            tokens = record.prompt_tokens + record.resume.measure.tokens
            handed_tokens += -(-tokens // digest.block_tokens) * digest.block_tokens
            handed += 1
            self._make_busy(key, replica)
            self._shares.give(lane_of(record), record.prompt_tokens / record.weight)
            new_tokens = record.prompt_tokens - self._found(replica, now_unix_s, record)
            self._loads.placed(replica, new_tokens, now_unix_s, best_effort=not attainable)
            service_class = ServiceClass.STANDARD if attainable else ServiceClass.BEST_EFFORT
            actions.append(Place(key, replica, digest.incarnation, service_class))
        for record in too_late_here:
            self._hopeful.add(record)

    def _found(self, replica: ReplicaId, now_unix_s: float, record: Record) -> int:
        """The tokens of the prompt that the replica has."""
        return self._prefixes.found(replica, record.prefix, record.prompt_tokens, now_unix_s)

    def _line(self, key: RequestKey, most: int) -> list[Record]:
        """The oldest requests that are equal to this one."""
        return [self._waiting[each].record for each in self._order.line(key, most)]

    def _alone(self, replica: ReplicaId, digest: Digest, now_unix_s: float) -> _AtOnce:
        """The most that this replica is handed at once, if it has only best-effort requests and has
        answered all its offers. Several such replicas share the waiting requests.
        """
        free = self._order.of(digest.model)
        if not free or not _has_best_effort_alone(digest) or replica in self._busy.values():
            return _AtOnce(0, 0.0)
        views = self._loads.views(now_unix_s).values()
        alone = sum(_has_best_effort_alone(each) for each in views if each.model == digest.model)
        part = math.ceil(free / max(alone, 1))
        slots = int((1 - KEPT) * digest.free_slots)
        room_tokens = (digest.kv_free_blocks - KEPT * digest.kv_blocks) * digest.block_tokens
        tokens = max(min(ALONE_S / digest.token_s, room_tokens), 0.0)
        return _AtOnce(min(part, slots, ALONE_MOST), tokens)

    def _hopeful_until_unix_s(self, record: Record) -> float:
        """The next deadline less predicted time and margin; -inf if late or without a deadline."""
        due = record.slo.last_due_unix_s(record.arrived_unix_s)
        if record.resume.measure.tokens:
            if record.resume.measure.late_tokens:
                return -math.inf
            due = min(due, record.resume.measure.next_due_unix_s)
        else:
            due = min(due, record.slo.first_due_unix_s(record.arrived_unix_s))
        if math.isinf(due):
            return -math.inf
        predicted_s = record.prompt_tokens * 2 * TOKEN_S
        if record.slo.ttlt_s is not None:
            predicted_s += 0.05 * record.max_tokens
        return due - self._set.promote_margin * predicted_s
