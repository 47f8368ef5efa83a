"""The requests that a replica holds, from its request table, for those who watch it."""

from collections.abc import Iterable

from shared.core.replica.request_table import RequestTable
from shared.schemas import RosterEntry
from shared.vocabulary import ServiceClass


def roster(table: RequestTable, slots: Iterable[int]) -> list[RosterEntry]:
    """The entries of these slots, or of all where none is named; an empty slot has none."""
    wanted = list(slots) or list(table.offers)
    return [_entry(table, slot) for slot in wanted if slot in table.offers]


def _entry(table: RequestTable, slot: int) -> RosterEntry:
    offer, row = table.offers[slot], table.row_of[slot]
    return RosterEntry(
        slot=slot,
        key=offer.key,
        attempt=offer.attempt,
        service_class=ServiceClass.BEST_EFFORT if table.best_effort[row] else ServiceClass.STANDARD,
        tier=offer.tier,
        slo=offer.slo,
        arrived_unix_s=offer.arrived_unix_s,
        prompt_tokens=offer.prompt_tokens,
        max_tokens=offer.max_tokens,
        computed_tokens=int(table.computed_tokens[row]),
        generated_tokens=int(table.generated_tokens[row]),
        next_due_unix_s=float(table.next_due_unix_s[row]),
        thinking=bool(table.thinking[row]),
    )
