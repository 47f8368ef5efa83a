"""Checks that the columns of an ack fit together, and finds what it reports of each plan entry."""

from typing import NamedTuple

import numpy as np

from shared.columns import Indices, Ints, unpack
from shared.core.replica.in_flight import InFlightPlan
from shared.schemas import PlanAck


class OutOfSync(Exception):
    """The request table differs from the worker's state: that must be read anew."""


class Reported(NamedTuple):
    """The worker's report of each entry of a plan; zeros where it skipped the entry."""

    computed: Ints
    emitted: Ints
    drafted: Ints
    cached: Ints


def reported(ack: PlanAck, flight: InFlightPlan, capacity: int) -> Reported:
    """The ack's columns along the plan's entries. `capacity`: slots of the replica."""
    nothing = bytes(len(ack.slots))
    columns = [
        unpack(raw)
        for raw in (ack.computed, ack.emitted, ack.drafted or nothing, ack.cached or nothing)
    ]
    if ack.slots != flight.packed_slots:
        at = positions(unpack(ack.slots), flight.slots, capacity)
        columns = [np.where(at >= 0, np.append(column, np.int32(0))[at], 0) for column in columns]
    return Reported(*columns)


def beyond(did: Reported, flight: InFlightPlan) -> bool:
    """True if an entry did more than its plan asked, or less than nothing. No worker does that, and
    a row whose prefill went past its end would never be planned again.
    """
    most = np.where(flight.decode, flight.asked, 1)
    found = np.where(flight.decode, 0, did.cached)
    least = np.minimum(np.minimum(did.computed, did.emitted), did.cached)
    return bool(
        np.count_nonzero(least < 0)
        or np.count_nonzero(did.computed - found > flight.asked)
        or np.count_nonzero(did.emitted > most)
    )


def positions(slots: Ints | Indices, wanted: Indices, capacity: int) -> Ints:
    """The index of each wanted slot in `slots`; -1 where it is not there."""
    at = np.full(capacity, -1, dtype=np.int32)
    at[slots] = np.arange(len(slots), dtype=np.int32)
    indices: Ints = at[wanted]
    return indices


def well_formed(ack: PlanAck, planned: bytes, capacity: int) -> bool:
    """Columns have equal lengths, and slots exist. `planned`: the slots of the plan in flight,
    which do exist.
    """
    if any(column and len(column) != len(ack.slots) for column in (ack.drafted, ack.cached)):
        return False
    if not len(ack.slots) == len(ack.computed) == len(ack.emitted):
        return False
    if len(ack.answering) != len(ack.thinking_tokens):
        return False
    if len(ack.slots) % 4 or len(ack.skipped) % 4 or len(ack.answering) % 4:
        return False
    named = unpack(ack.answering if ack.slots == planned else ack.slots + ack.answering)
    return not len(named) or (int(named.min()) >= 0 and int(named.max()) < capacity)
