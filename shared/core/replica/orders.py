"""The orders of a plan: all that it says besides its entries. They take effect before the entries,
on the worker as in the books.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.core.replica.prediction import Prediction
from shared.core.replica.request_table import WAITING, Books
from shared.policy.seam import Choice
from shared.vocabulary import FinishReason


@dataclass(slots=True)
class Orders:
    released: list[tuple[int, str]] = field(default_factory=list)  # slot, why
    preempted: list[int] = field(default_factory=list)
    relegated: list[int] = field(default_factory=list)
    promoted: Sequence[int] = ()


def write_orders(
    choice: Choice, expired: Iterable[int], books: Books, ahead: Prediction, *, hand_back: bool
) -> Orders:
    """Write a choice's orders, and the release of what has expired, into the books.

    `hand_back`: a relegated request that has not begun leaves for the relegation service.
    """
    orders = Orders(promoted=choice.promote, preempted=list(choice.preempt))
    orders.released += [(slot, FinishReason.EXPIRED.value) for slot in sorted(expired)]
    for slot in choice.relegate:
        if hand_back and not _begun(slot, books):
            orders.released.append((slot, "relegated"))
        else:
            orders.relegated.append(slot)
        books.best_effort[books.row_of[slot]] = True
    for slot in choice.promote:
        books.best_effort[books.row_of[slot]] = False
    orders.released += choice.release
    for slot, _ in orders.released:
        ahead.release(slot)
    for slot in orders.preempted:
        ahead.preempt(slot)
    return orders


def _begun(slot: int, books: Books) -> bool:
    """Something of it is computed, or it has made a token here."""
    row = books.row_of[slot]
    made_here = books.generated_tokens[row] > books.offers[slot].generated_tokens
    return bool(books.phase[row] != WAITING or made_here)


def gives_way(books: Books, first: int | None) -> int | None:
    """KV is full and no entry fits, not even that of slot `first`. The slot whose KV makes room for
    it: a best-effort request's, else that of the latest arrival. None: dropping KV would not help.
    """
    holding = np.flatnonzero(
        (books.kv_held_blocks[: books.live] > 0)
        & (books.slot[: books.live] != (-1 if first is None else first))
    )
    if len(holding) < (2 if first is None else 1):
        return None
    order = np.lexsort(
        (books.slot[holding], books.arrived_unix_s[holding], books.best_effort[holding])
    )
    return int(books.slot[holding[order[-1]]])
