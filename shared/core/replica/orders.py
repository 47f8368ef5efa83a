"""The orders of a plan, which are all of it but its entries: releases, preemptions, relegations and
promotions. The worker and the request table carry them out before the entries.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.columns import pack
from shared.core.replica.in_flight import InFlightPlan
from shared.core.replica.prediction import Prediction
from shared.core.replica.request_table import RequestTable
from shared.core.replica.table_rows import WAITING
from shared.policy.seam import Choice
from shared.schemas import Announce, BatchPlan
from shared.vocabulary import FinishReason


@dataclass(slots=True)
class Orders:
    released: list[tuple[int, str]] = field(default_factory=list)  # slot, why
    preempted: list[int] = field(default_factory=list)
    relegated: list[int] = field(default_factory=list)
    promoted: Sequence[int] = ()

    @property
    def take(self) -> bool:
        """True if the orders take from some request its slot, its KV or its class."""
        return bool(self.released or self.preempted or self.relegated)

    def plan(
        self, flight: InFlightPlan, facts: Announce, *, epoch: int, sync: int, decodes_s: float
    ) -> BatchPlan:
        """The plan with these orders, as its worker gets it."""
        return BatchPlan(
            replica=facts.replica,
            incarnation=facts.incarnation,
            epoch=epoch,
            sync=sync,
            seq=flight.seq,
            slots=flight.packed_slots,
            caps=pack(flight.caps),
            predicted_s=flight.predicted_s,
            decodes_s=decodes_s,
            drafts_s=flight.draft_s,
            released=_packed([slot for slot, _ in self.released]),
            released_why=[why for _, why in self.released],
            preempted=_packed(self.preempted),
            relegated=_packed(self.relegated),
            promoted=_packed(self.promoted),
            selection=flight.selection,
        )


def _packed(slots: Sequence[int]) -> bytes:
    return pack(slots) if slots else b""


def write_orders(
    choice: Choice,
    expired: Iterable[int],
    moving: Iterable[int],
    table: RequestTable,
    ahead: Prediction,
    *,
    hand_back: bool,
) -> Orders:
    """Write a choice's orders, and the release of expired and of moving requests, into the request
    table.

    `hand_back`: a relegated request that has not begun leaves for the relegation service.
    """
    orders = Orders(promoted=choice.promote, preempted=list(choice.preempt))
    orders.released += [(slot, FinishReason.EXPIRED.value) for slot in sorted(expired)]
    for slot in choice.relegate:
        if hand_back and not _begun(slot, table):
            orders.released.append((slot, "relegated"))
        else:
            orders.relegated.append(slot)
        table.set_best_effort(slot, True)
    for slot in choice.promote:
        table.set_best_effort(slot, False)
    orders.released += choice.release
    going = {slot for slot, _ in orders.released}
    orders.released += [(slot, "drained") for slot in moving if slot not in going]
    for slot, _ in orders.released:
        ahead.release(slot)
    for slot in orders.preempted:
        ahead.preempt(slot)
    return orders


def _begun(slot: int, table: RequestTable) -> bool:
    """True if something of the request is computed, or it has made a token here."""
    row = table.row_of[slot]
    made_here = table.generated_tokens[row] > table.offers[slot].generated_tokens
    return bool(table.phase[row] != WAITING or made_here)


def gives_way(table: RequestTable, first: int | None) -> int | None:
    """The slot whose KV is dropped where KV is full and no entry fits, not even that of slot
    `first`: a best-effort request's, else the latest arrival's. None if dropping KV would not help.
    """
    holding = np.flatnonzero(
        (table.kv_held_blocks[: table.live] > 0)
        & (table.slot[: table.live] != (-1 if first is None else first))
    )
    if len(holding) < (2 if first is None else 1):
        return None
    order = np.lexsort(
        (table.slot[holding], table.arrived_unix_s[holding], table.best_effort[holding])
    )
    return int(table.slot[holding[order[-1]]])
