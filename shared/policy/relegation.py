"""RelegationCore: the best-effort pool. Which relegated request goes to which replica that reports surplus.

Order: importance, then the tenant that has been given least, then age. A request whose SLO has become attainable again goes
back as standard. The records are the queue; this is a working copy that can be listed again at any time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.policy.debits import TOKEN_S, Debits
from shared.schemas import Digest, Record
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass


@dataclass(frozen=True, slots=True)
class Listed:
    """Every relegated record there is."""

    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class Queued:
    record: Record


@dataclass(frozen=True, slots=True)
class Heard:
    digest: Digest


@dataclass(frozen=True, slots=True)
class Taken:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Declined:
    key: RequestKey
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Gone:
    """Ended, cancelled, or no longer relegated."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Tick:
    pass


RelegationEvent = Listed | Queued | Heard | Taken | Declined | Gone | Tick


@dataclass(frozen=True, slots=True)
class Place:
    """Write the record (attempt + 1, this replica, this class), then offer it there."""

    key: RequestKey
    replica: ReplicaId
    incarnation: str
    service_class: ServiceClass


@dataclass(frozen=True, slots=True)
class Expire:
    key: RequestKey


RelegationAction = Place | Expire


class RelegationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    per_digest: int = 2  # requests handed to one replica before its next digest
    declined_s: float = 0.5  # a replica that declined is left alone for this long
    promote_margin: float = 2.0  # an SLO counts as attainable if twice the predicted time is left


@dataclass(slots=True)
class _Waiting:
    record: Record
    busy: bool = False


class RelegationCore:
    """One holder at a time."""

    def __init__(self, settings: RelegationSettings | None = None) -> None:
        self._set = settings or RelegationSettings()
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._debits = Debits()
        self._handed: dict[ReplicaId, int] = {}
        self._not_before_unix_s: dict[ReplicaId, float] = {}
        self._given: dict[str, int] = {}  # tokens given per tenant

    @property
    def idle(self) -> bool:
        return not any(w.busy for w in self._waiting.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def wake_at_unix_s(self) -> float | None:
        """Digests wake it; only an expiry needs the clock."""
        return min((w.record.expires_unix_s for w in self._waiting.values() if not w.busy), default=None)

    def handle(self, event: RelegationEvent, *, now_unix_s: float) -> list[RelegationAction]:
        actions: list[RelegationAction] = []
        match event:
            case Listed(records):
                busy = {k: w for k, w in self._waiting.items() if w.busy}
                self._waiting = {r.key: busy.get(r.key) or _Waiting(r) for r in records} | busy
            case Queued(record):
                if record.key not in self._waiting:
                    self._waiting[record.key] = _Waiting(record)
            case Heard(digest):
                self._debits.heard(digest)
                self._handed[digest.replica] = 0
                if digest.accepting and now_unix_s >= self._not_before_unix_s.get(digest.replica, 0.0):
                    self._hand_out(digest, now_unix_s, actions)
            case Taken(key) | Gone(key):
                self._waiting.pop(key, None)
            case Declined(key, replica):
                self._not_before_unix_s[replica] = now_unix_s + self._set.declined_s
                if key in self._waiting:
                    self._waiting[key].busy = False
            case Tick():
                pass
        for key, waiting in list(self._waiting.items()):
            if not waiting.busy and waiting.record.expires_unix_s <= now_unix_s:
                waiting.busy = True
                actions.append(Expire(key))
        return actions

    def _hand_out(self, digest: Digest, now_unix_s: float, actions: list[RelegationAction]) -> None:
        """The first in order for a replica with surplus; and back to standard whoever can make it there."""
        if not self._waiting:
            return
        for waiting in sorted((w for w in self._waiting.values() if not w.busy), key=self._order):
            record = waiting.record
            if self._handed[digest.replica] >= self._set.per_digest:
                return
            if self._attainable(record, digest, now_unix_s):
                service_class = ServiceClass.STANDARD
            elif digest.surplus:
                service_class = ServiceClass.BEST_EFFORT
            else:
                continue
            if digest.free_slots <= self._handed[digest.replica]:
                return
            self._handed[digest.replica] += 1
            waiting.busy = True
            tenant = record.key.partition(".")[0]
            self._given[tenant] = self._given.get(tenant, 0) + record.prompt_tokens
            self._debits.placed(digest.replica, record.prompt_tokens, now_unix_s, best_effort=True)
            actions.append(Place(record.key, digest.replica, digest.incarnation, service_class))

    def _order(self, waiting: _Waiting) -> tuple[float, int, float, RequestKey]:
        record = waiting.record
        return (-record.importance, self._given.get(record.key.partition(".")[0], 0), record.arrived_unix_s, record.key)

    def _attainable(self, record: Record, digest: Digest, now_unix_s: float) -> bool:
        """Would it make its next deadline there, with a margin? Only where nothing standard waits."""
        due = record.slo.last_due_unix_s(record.arrived_unix_s)
        if record.resume.measure.tokens:
            if record.resume.measure.late_tokens:
                return False
            due = min(due, record.resume.measure.next_due_unix_s)
        else:
            due = min(due, record.slo.first_due_unix_s(record.arrived_unix_s))
        if digest.waiting or math.isinf(due):
            return False
        predicted_s = digest.backlog_s + record.prompt_tokens * 2 * TOKEN_S
        if record.slo.ttlt_s is not None:
            predicted_s += 0.05 * record.max_tokens
        return now_unix_s + self._set.promote_margin * predicted_s <= due
