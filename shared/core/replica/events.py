"""The settings of a ReplicaCore, the events that it handles, and the actions that it asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from shared.columns import Ints
from shared.core.tick import Tick
from shared.perf.shape import BatchShape
from shared.schemas import (
    Announce,
    BatchPlan,
    Hold,
    HoldAnswer,
    Offer,
    OfferAnswer,
    PlanAck,
    ResyncEntry,
)
from shared.vocabulary import RequestKey, Role


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the core. Depth 1 and lead 0 reproduce the papers' loop without latency."""

    depth: int = 2  # plans the worker has: one running, one waiting
    # first guess of how long before the end of N plan N+1 must leave; adapted to measured idle time
    lead_s: float = 0.004
    lead_max_s: float = 0.030
    # an ack this late after its prediction (plus five times the prediction) means resync
    overdue_s: float = 1.0
    hand_back: bool = True  # relegated requests that have not begun go to the relegation service
    best_effort_waiting: int = 4  # surplus is reported while fewer best-effort prefills wait


@dataclass(frozen=True, slots=True)
class Synced:
    """The worker's whole state after its last iteration; it has dropped the plans not begun."""

    announce: Announce
    sync: int
    next_seq: int
    ack_seq: int
    entries: Sequence[ResyncEntry]
    shared_blocks: int = 0
    draft_shared_blocks: int = 0
    kept: bytes = b""  # hashes of the prefixes that the engine keeps on its GPU
    moved: bytes = b""  # and of those in the host's memory


@dataclass(frozen=True, slots=True)
class Offered:
    """Offers that came together are decided together."""

    offers: Sequence[Offer]


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """No worker answers holds: the replica has no worker now."""


@dataclass(frozen=True, slots=True)
class HoldDone:
    """The answer to a hold. No answer in time counts as OfferInDoubt."""

    slot: int
    answer: HoldAnswer | WorkerGone


@dataclass(frozen=True, slots=True)
class Acked:
    ack: PlanAck


class DraftedIteration(NamedTuple):
    """An iteration of decodes of which some drafted. Columns run along its entries."""

    ended_unix_s: float
    exec_s: float
    drafted_s: float  # the part of `exec_s` before the target's pass
    shape: BatchShape
    drafted: Ints  # draft tokens verified
    made: Ints  # tokens


@dataclass(frozen=True, slots=True)
class Leapt:
    """The plan in flight has run `iterations` times, and is running once more (in virtual time,
    where ReplicaCore.repeats allows it).
    """

    iterations: int
    ended_unix_s: float  # the end of the last iteration
    exec_s: float  # of all these iterations together
    drafted: Sequence[DraftedIteration] = ()  # each iteration, if the plan speculates


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker refused a plan."""

    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker announced itself: its facts may have changed, and it tells its newest ack.
    `receivers`: the other replicas of its model that take requests. `role`: what it serves now, if
    that is not fixed.
    """

    announce: Announce
    receivers: int = 0
    role: Role = Role.BOTH


ReplicaEvent = Synced | Offered | HoldDone | Acked | Leapt | Refused | Heartbeat | Tick


@dataclass(frozen=True, slots=True)
class Answer:
    key: RequestKey
    attempt: int
    answer: OfferAnswer


@dataclass(frozen=True, slots=True)
class SendHold:
    hold: Hold


@dataclass(frozen=True, slots=True)
class SendPlan:
    plan: BatchPlan


@dataclass(frozen=True, slots=True)
class NeedResync:
    reason: str


ReplicaAction = Answer | SendHold | SendPlan | NeedResync
