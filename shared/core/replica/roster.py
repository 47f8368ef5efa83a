"""The requests that a replica holds, from its books, for those who watch it."""

from collections.abc import Iterable

from shared.core.replica.request_table import Books
from shared.schemas import RosterEntry
from shared.vocabulary import ServiceClass


def roster(books: Books, slots: Iterable[int]) -> list[RosterEntry]:
    """The entries of these slots, or of all where none is named; an empty slot has none."""
    wanted = list(slots) or list(books.offers)
    return [_entry(books, slot) for slot in wanted if slot in books.offers]


def _entry(books: Books, slot: int) -> RosterEntry:
    offer, row = books.offers[slot], books.row_of[slot]
    return RosterEntry(
        slot=slot,
        key=offer.key,
        attempt=offer.attempt,
        service_class=ServiceClass.BEST_EFFORT if books.best_effort[row] else ServiceClass.STANDARD,
        tier=offer.tier,
        slo=offer.slo,
        arrived_unix_s=offer.arrived_unix_s,
        prompt_tokens=offer.prompt_tokens,
        max_tokens=offer.max_tokens,
        computed_tokens=int(books.computed_tokens[row]),
        generated_tokens=int(books.generated_tokens[row]),
        next_due_unix_s=float(books.next_due_unix_s[row]),
        thinking=bool(books.thinking[row]),
    )
