"""What a ReplicaCore is told, and what it asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.tick import Tick
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
from shared.vocabulary import RequestKey


@dataclass(frozen=True, slots=True)
class Synced:
    """The worker's whole state, at the end of its last iteration; it has dropped plans that it had
    not begun.
    """

    announce: Announce
    sync: int
    next_seq: int
    ack_seq: int
    entries: Sequence[ResyncEntry]


@dataclass(frozen=True, slots=True)
class Offered:
    """Offers that came together are decided together."""

    offers: Sequence[Offer]


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """Nobody answers holds: the replica has no worker now."""


@dataclass(frozen=True, slots=True)
class HoldDone:
    """What came of a hold. No answer in time counts as HoldInDoubt."""

    slot: int
    answer: HoldAnswer | WorkerGone


@dataclass(frozen=True, slots=True)
class Acked:
    ack: PlanAck


@dataclass(frozen=True, slots=True)
class Leapt:
    """The plan in flight was run so many times already, and once more is under way (virtual time;
    ReplicaCore.repeats allows it).
    """

    iterations: int
    ended_unix_s: float  # the last of them
    exec_s: float  # all of them


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker refused a plan."""

    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker announced itself: its facts may have changed (draining), and it says which acks
    there are.
    """

    announce: Announce


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
