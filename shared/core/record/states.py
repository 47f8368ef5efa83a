"""The states of a request, and the events that apply in each (drawn in docs/architecture.md)."""

from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum

from shared.schemas import Record
from shared.vocabulary import RecordState


class State(StrEnum):
    """The state of a request, derived from its record: its verdict, its place, its tombstone."""

    WAITING = "waiting"  # its owner, an admission, looks for a place
    PLACED = "placed"  # its record names a replica, which is offered it, holds it or declined it
    RELEGATED = "relegated"  # in the best-effort pool
    CANCELLED_WAITING = "cancelled, waiting"
    CANCELLED_PLACED = "cancelled, placed"
    CANCELLED_RELEGATED = "cancelled, relegated"
    ENDED = "ended"  # it has a verdict


class Event(Enum):
    """The events of a record. The function of the same name makes the change."""

    PLACED = "placed"
    DRAWN = "drawn"
    HELD = "held"
    DECLINED = "declined"
    RELEGATED = "relegated"
    SETTLED = "settled"
    MOVED = "moved"
    LOST = "lost"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    REFUSED = "refused"
    EXPIRED = "expired"
    FITTED = "fitted"
    UNSERVED = "unserved"


# Event -> state before -> possible states after. Where a state is left out, nothing changes.
LIFE: Mapping[Event, Mapping[State, Sequence[State]]] = {
    Event.PLACED: {State.WAITING: [State.PLACED], State.PLACED: [State.PLACED]},
    Event.DRAWN: {State.RELEGATED: [State.PLACED]},
    Event.HELD: {State.PLACED: [State.PLACED]},
    Event.DECLINED: {
        State.PLACED: [State.RELEGATED],
        State.CANCELLED_PLACED: [State.CANCELLED_RELEGATED],
    },
    Event.RELEGATED: {State.WAITING: [State.RELEGATED], State.PLACED: [State.RELEGATED]},
    Event.SETTLED: {
        State.PLACED: [State.WAITING, State.RELEGATED, State.ENDED],
        State.CANCELLED_PLACED: [State.ENDED],
    },
    Event.MOVED: {
        State.WAITING: [State.WAITING, State.RELEGATED],
        State.PLACED: [State.WAITING, State.RELEGATED],
        State.CANCELLED_WAITING: [State.ENDED],
        State.CANCELLED_PLACED: [State.ENDED],
    },
    Event.LOST: {
        State.PLACED: [State.WAITING, State.RELEGATED, State.ENDED],
        State.CANCELLED_PLACED: [State.ENDED],
    },
    Event.CANCELLED: {
        State.WAITING: [State.CANCELLED_WAITING],
        State.PLACED: [State.CANCELLED_PLACED],
        State.RELEGATED: [State.CANCELLED_RELEGATED],
    },
    Event.CLOSED: {
        State.CANCELLED_WAITING: [State.ENDED],
        State.CANCELLED_RELEGATED: [State.ENDED],
    },
    Event.REFUSED: {
        State.WAITING: [State.ENDED],
        State.PLACED: [State.ENDED],
        State.CANCELLED_WAITING: [State.ENDED],
        State.CANCELLED_PLACED: [State.ENDED],
    },
    Event.EXPIRED: {State.RELEGATED: [State.ENDED], State.CANCELLED_RELEGATED: [State.ENDED]},
    Event.FITTED: {State.RELEGATED: [State.RELEGATED, State.ENDED]},
    Event.UNSERVED: {State.RELEGATED: [State.ENDED], State.CANCELLED_RELEGATED: [State.ENDED]},
}


def state_of(record: Record) -> State:
    if record.verdict is not None or record.state == RecordState.ENDED:
        return State.ENDED
    if record.state == RecordState.RELEGATED:
        return State.CANCELLED_RELEGATED if record.cancelled else State.RELEGATED
    if record.replica is None:
        return State.CANCELLED_WAITING if record.cancelled else State.WAITING
    return State.CANCELLED_PLACED if record.cancelled else State.PLACED


def applies(event: Event, record: Record) -> bool:
    return state_of(record) in LIFE[event]
