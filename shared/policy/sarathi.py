"""Sarathi's scheduler, the baseline of QoServe section 4: all decodes, then prefills in an order,
until a fixed chunk is full.

The policies `fcfs`, `edf`, `srpf` and `sjf` differ only in that order (`ORDERS`). None relegates,
none learns.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.fit import accept_what_fits
from shared.policy.overdue import dropping, past_due
from shared.policy.seam import Admission, Bools, Choice, Declared, Floats, Observation, View
from shared.routing.routings import RouterName
from shared.schemas import Offer

# The key of each row that is still to prefill: the smallest goes first. Progress must not make the
# key of the first row larger than that of another.
Key = Callable[[View, Rows], Floats]


def arrival(view: View, queue: Rows) -> Floats:
    """First come, first served."""
    return view.arrived_unix_s[queue]


def deadline(view: View, queue: Rows) -> Floats:
    """Earliest deadline first: the sooner of the next token's deadline and TTLT."""
    due: Floats = np.minimum(view.next_due_unix_s[queue], view.last_due_unix_s[queue])
    return due


def remaining(view: View, queue: Rows) -> Floats:
    """Shortest remaining prefill first (QoServe sections 2.4 and 4.2): a shorter arrival overtakes
    a prefill that has begun.
    """
    left: Floats = (view.target_tokens[queue] - view.computed_tokens[queue]).astype(np.float64)
    return left


def size(view: View, queue: Rows) -> Floats:
    """Shortest job first (QoServe section 2.4) by the whole prompt, as outputs are not known; a
    prefill that has begun is not overtaken.
    """
    return np.where(view.phase[queue] == chunk.PREFILL, 0.0, view.target_tokens[queue])


ORDERS: dict[str, Key] = {"fcfs": arrival, "edf": deadline, "srpf": remaining, "sjf": size}


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # tokens of one iteration, decodes included (QoServe section 4, shared clusters)
    chunk_tokens: Annotated[int, Meta(ge=1)] = 256
    # the chunk shrinks until the iteration is this short (Medha, PolyServe)
    iteration_s: Annotated[float, Meta(gt=0)] = math.inf
    # requests that wait past their deadline, as Ascendra compares (its section 8.6)
    drop_late: bool = False
    router: RouterName = "attainable"


class Sarathi:
    """Decodes, then prefills by the smallest key, then by arrival; best-effort ones last."""

    def __init__(self, name: str, settings: Settings) -> None:
        """`name`: one of `ORDERS`."""
        self.name = name
        self.declared = Declared(drops=settings.drop_late)
        self._key = ORDERS[name]
        self._set = settings

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return accept_what_fits(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        decodes = chunk.decoding(view)
        limit_tokens = self._set.chunk_tokens - len(decodes.rows)
        queue = (~view.in_decode).nonzero()[0]
        late = past_due(view) if self._set.drop_late else queue[:0]
        if len(late):
            queue = queue[~np.isin(queue, late)]
        key = self._key(view, queue)
        if len(queue) > 2 * self._set.chunk_tokens:
            near = _within_reach(view, queue, key, self._set.chunk_tokens + len(decodes.victims))
            queue, key = queue[near], key[near]
        order = chunk.in_order(view, queue, view.best_effort[queue], key)
        choice = chunk.fill(
            view,
            decodes,
            order,
            limit_tokens=limit_tokens,
            budget_s=self._set.iteration_s,
            steady=True,
        )
        waits = self._set.drop_late and len(queue) + len(late) > 0
        return [dropping(view, choice, late) if waits else choice]

    def observe(self, seen: Observation) -> None:
        pass


def _within_reach(view: View, queue: Rows, key: Floats, entries: int) -> Bools:
    """A mask of the rows of a long queue that can get a token in an iteration of so many entries:
    those that have begun, and so many of the first.

    A prefill that has not begun is passed over only if none behind it begins either
    (shared/policy/chunk.py).
    """
    standard = view.standard[queue]
    near: Bools = view.phase[queue] == chunk.PREFILL
    if np.count_nonzero(standard) <= entries:
        return np.ones(len(queue), dtype=np.bool_)
    near |= standard & (key <= np.partition(key[standard], entries)[entries])
    return near
