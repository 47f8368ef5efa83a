"""The correction of the books by acks: where the worker did something else than was predicted (a
stop, a skip, fewer or more accepted drafts, a prefix found in a cache, no room).
"""

import math
from typing import NamedTuple

import numpy as np

from shared.columns import Indices, Ints, pack
from shared.core.replica.ack_columns import Reported, beyond, positions, reported
from shared.core.replica.in_flight import Flight, shape_of
from shared.core.replica.prediction import Prediction
from shared.core.replica.request_table import DECODE, PREFILL, WAITING, Books
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools, Drafts
from shared.schemas import PlanAck


class Landing(NamedTuple):
    """An acked flight."""

    shape: BatchShape  # as it was run
    drafts: Drafts | None  # what its speculation did
    missed: int  # entries that did what was not foreseen


class Reconciliation:
    """The books and flights of one replica, as acks find them."""

    def __init__(self, books: Books, ahead: Prediction) -> None:
        self._books = books
        self._ahead = ahead

    def reconcile(self, flight: Flight, ack: PlanAck) -> Landing | None:
        """Correct the books by what the worker did otherwise than predicted. None: it cannot have
        done that, and nothing was corrected.
        """
        books = self._books
        rows = books.row_of[flight.slots]  # until a row moves
        held: Bools = rows >= 0
        if _just_as_predicted(flight, ack):
            books.acked_token_unix_s[flight.makers] = ack.ended_unix_s
            if np.count_nonzero(flight.firsts):
                began = flight.firsts & held
                self._first_tokens(rows[began], flight.emitted[began], ack.ended_unix_s)
            return Landing(flight.shape, None, 0)
        did = reported(ack, flight, books.capacity)
        known = books.prompt_tokens[rows] + books.generated_tokens[rows]
        too_far = held & ~flight.decode & (flight.has + did.computed > known)
        if beyond(did, flight) or np.count_nonzero(too_far):
            return None
        tbt_s, application = books.tbt_s[rows], books.application[rows]
        # the KV is still that which this plan filled
        same: Bools = held & (books.restarts[rows] == flight.restarts)
        books.unsure_tokens[rows[same]] -= flight.unsure[same]
        books.acked_token_unix_s[flight.slots[did.emitted > 0]] = ack.ended_unix_s
        if np.count_nonzero(flight.firsts):
            began = flight.firsts & held
            self._first_tokens(rows[began], did.emitted[began], ack.ended_unix_s)
        missed = self._correct(flight, did, held, same, ack.ended_unix_s)
        self._hold_kv(flight.slots[same])
        drafted = held & (did.drafted > 0)
        drafts = None
        if np.count_nonzero(drafted):
            accepted = np.maximum(did.emitted[drafted] - 1, 0)
            drafts = Drafts(tbt_s[drafted], application[drafted], did.drafted[drafted], accepted)
        return Landing(_shape_as_run(flight, did), drafts, missed)

    def _correct(
        self, flight: Flight, did: Reported, held: Bools, same: Bools, ended_unix_s: float
    ) -> int:
        """Correct every entry that did otherwise; return how many did what was not foreseen."""
        otherwise = held & ((did.computed != flight.computed) | (did.emitted != flight.emitted))
        if flight.selection is not None:
            otherwise &= ~self._accept(flight, did, same)
        missed = 0
        for i in np.flatnonzero(otherwise).tolist():
            slot = int(flight.slots[i])
            computed, emitted = int(did.computed[i]), int(did.emitted[i])
            prefill = same[i] and not flight.decode[i] and slot not in self._ahead.releasing
            if prefill and computed != flight.computed[i]:
                self._predict_again(flight, i, computed, emitted, ended_unix_s)
                missed += 1
            else:
                missed += not self._correct_entry(flight, i, computed, emitted, bool(same[i]))
        return missed

    def _accept(self, flight: Flight, did: Reported, same: Bools) -> Bools:
        """Add the accepted drafts of the entries that stayed within their bound and go on: most of
        those that speculate, so all at once. Returns which entries these are.

        Accepted drafts are in the draft model's KV too (of a draft accepted to its last token, all
        but that one).
        """
        books, rows = self._books, self._books.row_of[flight.slots]
        extra = did.emitted - flight.emitted
        more: Bools = (
            same
            & flight.decode
            & (extra > 0)
            & (extra == did.computed - flight.computed)
            & (extra <= flight.unsure)
        )
        more[more] = books.generated_tokens[rows[more]] + extra[more] < books.max_tokens[rows[more]]
        if self._ahead.releasing:
            more &= ~np.isin(flight.slots, list(self._ahead.releasing))
        grown, extra = rows[more], extra[more]
        books.generated_tokens[grown] += extra
        books.computed_tokens[grown] += extra
        books.draft_tokens[grown] += extra
        books.next_due_unix_s[grown] += extra * books.tbt_s[grown]
        return more

    def _correct_entry(
        self, flight: Flight, i: int, computed: int, emitted: int, same: bool
    ) -> bool:
        """One entry did otherwise than its row assumes. True if that was foreseen: more drafts were
        accepted than the one token counted.
        """
        books, slot = self._books, int(flight.slots[i])
        row = int(books.row_of[slot])
        extra = emitted - int(flight.emitted[i])
        moved = computed - int(flight.computed[i])
        foreseen = bool(0 < extra == moved <= flight.unsure[i])
        books.generated_tokens[row] += extra
        if slot in self._ahead.releasing:
            return True
        if math.isfinite(books.next_due_unix_s[row]):
            books.next_due_unix_s[row] += extra * books.tbt_s[row]
        known = books.prompt_tokens[row] + books.generated_tokens[row]
        if not same:  # preempted since: only what must be computed again has changed
            if books.phase[row] != DECODE:
                books.target_tokens[row] = known
            return True
        books.computed_tokens[row] = max(books.computed_tokens[row] + moved, 0)
        if books.computed_tokens[row] < known - 1 or books.generated_tokens[row] == 0:
            books.target_tokens[row] = known
            books.phase[row] = PREFILL if books.computed_tokens[row] else WAITING
        else:
            books.phase[row] = DECODE
        self._stay_or_leave(slot)
        return foreseen

    # ------------------------------------------------------------ a prefill at another position

    def _predict_again(
        self, flight: Flight, i: int, computed: int, emitted: int, ended_unix_s: float
    ) -> None:
        """A prefill got further than planned, by what a prefix cache had of it, or nowhere for want
        of room. The plans behind it begin there: their effects on its row are taken back and
        predicted again.

        The table says what becomes of the row with one plan behind, in the notation of
        `Prediction.launch`; `has` is where the acked entry began, `cap` its chunk. `found`: the
        cache had `found` positions more, and the prompt still does not end. `ends behind`: with
        them it ends in the plan behind. `ends here`: it ended in the acked plan, and the plan
        behind decodes. `no room`: the engine did nothing of a chunk. `no room, last`: nor of a last
        chunk, so the decode behind, of cap 1, is one position of prefill.

          column              | found   | ends behind | ends here  | no room | no room, last
          --------------------+---------+-------------+------------+---------+--------------
          phase               | .       | DECODE      | DECODE     | .       | PREFILL
          target_tokens       | .       | .           | .          | .       | .
          computed_tokens     | + found | target      | target + 1 | - cap   | has + 1
          generated_tokens    | .       | + 1         | + 2        | .       | - 2
          first_token_unix_s  | .       | end_behind  | ended      | .       | inf
          newest_token_unix_s | .       | end_behind  | end_behind | .       | inf
          next_due_unix_s     | .       | + tbt_s     | + 2 tbt_s  | .       | - 2 tbt_s

        What the KV may become follows in `_hold_kv`.
        """
        books, slot = self._books, int(flight.slots[i])
        row = int(books.row_of[slot])
        behind = [
            (later, int(j))
            for later in self._ahead.flights
            for j in np.flatnonzero(later.slots == slot)
            if later.restarts[j] == books.restarts[row]
        ]
        self._take_back(row, [(flight, i), *behind])
        has = int(flight.has[i]) + computed
        self._emit(row, flight, i, emitted, ended_unix_s)
        for later, j in behind:
            known = int(books.prompt_tokens[row] + books.generated_tokens[row])
            decode = bool(books.generated_tokens[row] > 0 and has == known - 1)
            left, cap = known - has, int(later.caps[j])
            computed = 1 if decode else min(cap, left)
            later.predict_entry(j, has, computed, int(left <= cap), decode)
            has += computed
            self._emit(row, later, j, int(left <= cap), later.end_unix_s)
        known = int(books.prompt_tokens[row] + books.generated_tokens[row])
        books.kv.overdrawn = books.kv.overdrawn or has > books.computed_tokens[row]
        books.computed_tokens[row] = has
        decoding = books.generated_tokens[row] > 0 and has == known - 1
        books.phase[row] = DECODE if decoding else PREFILL if has else WAITING
        if not decoding:
            books.target_tokens[row] = known
        self._stay_or_leave(slot)

    def _take_back(self, row: int, entries: list[tuple[Flight, int]]) -> None:
        """Undo the tokens that these entries were predicted to make: their count, their deadlines,
        and the instant of the first.
        """
        books = self._books
        predicted = sum(int(flight.emitted[i]) for flight, i in entries)
        books.generated_tokens[row] -= predicted
        if predicted and math.isfinite(books.tbt_s[row]):
            books.next_due_unix_s[row] -= predicted * books.tbt_s[row]
        elif not books.generated_tokens[row]:
            books.next_due_unix_s[row] = books.first_due_unix_s[row]
        if any(flight.firsts[i] for flight, i in entries):
            books.first_token_unix_s[row] = math.inf
            if math.isinf(books.first_due_unix_s[row]):
                books.next_due_unix_s[row] = math.inf  # it counted from that token

    def _emit(self, row: int, flight: Flight, i: int, emitted: int, at_unix_s: float) -> None:
        """This entry makes a token at this instant, or none."""
        books = self._books
        flight.firsts[i] = emitted and math.isinf(books.first_token_unix_s[row])
        if not emitted:
            return
        if flight.firsts[i]:
            books.first_token_unix_s[row] = at_unix_s
        if math.isinf(books.next_due_unix_s[row]) and not books.generated_tokens[row]:
            books.next_due_unix_s[row] = at_unix_s
        books.generated_tokens[row] += 1
        books.next_due_unix_s[row] += books.tbt_s[row]

    # ------------------------------------------------------------ parts of every correction

    def _stay_or_leave(self, slot: int) -> None:
        """A row whose last token is predicted is no longer planned; another is, even if its end was
        predicted before.
        """
        books, row = self._books, int(self._books.row_of[slot])
        if books.generated_tokens[row] < books.max_tokens[row]:
            books.come_back(slot)
        else:
            books.leave(slot)

    def _first_tokens(self, rows: Indices, emitted: Ints, at_unix_s: float) -> None:
        """The predicted first tokens of these rows came at this instant, or not at all. A pace
        without a TTFT counts from there.
        """
        books = self._books
        anchored = np.isinf(books.first_due_unix_s[rows]) & np.isfinite(books.tbt_s[rows])
        instant = np.where(emitted > 0, at_unix_s, math.inf)
        shift = instant - books.first_token_unix_s[rows]
        books.next_due_unix_s[rows[anchored]] += shift[anchored]
        books.first_token_unix_s[rows] = instant

    def _hold_kv(self, slots: Indices) -> None:
        """Hold what these slots may still fill: after all plans in flight, and at the peak of each
        of them.
        """
        books = self._books
        rows = books.row_of[slots]
        upper = books.computed_tokens[rows] + books.unsure_tokens[rows]
        top = upper.copy()
        for flight in reversed(self._ahead.flights):
            at = positions(flight.slots, slots, books.capacity)
            runs = at >= 0
            runs[runs] = flight.restarts[at[runs]] == books.restarts[rows[runs]]
            upper[runs] -= (flight.computed + flight.unsure)[at[runs]]
            top[runs] = np.maximum(top[runs], upper[runs] + flight.caps[at[runs]])
        books.kv_held_blocks[rows] = -(-top // books.block_tokens)
        if books.draft_kv_blocks:
            books.draft_held_blocks[rows] = -(-self._draft_top(slots, rows) // books.block_tokens)

    def _draft_top(self, slots: Indices, rows: Indices) -> Ints:
        """The positions that the draft model may have of these slots, at the peak of each plan in
        flight and after it.
        """
        books = self._books
        after = books.computed_tokens[rows] + books.unsure_tokens[rows]
        top: Ints = books.draft_tokens[rows].copy()
        for flight in reversed(self._ahead.flights):
            at = positions(flight.slots, slots, books.capacity)
            runs = at >= 0
            runs[runs] = flight.restarts[at[runs]] == books.restarts[rows[runs]]
            before = after.copy()
            before[runs] -= (flight.computed + flight.unsure)[at[runs]]
            drafts = runs.copy()
            drafts[runs] = flight.draft_caps[at[runs]] > 0
            peak = before[drafts] + flight.draft_caps[at[drafts]]
            top[drafts] = np.maximum(top[drafts], np.maximum(peak, after[drafts]))
            after = before
        return top


def _just_as_predicted(flight: Flight, ack: PlanAck) -> bool:
    """Nothing is to be corrected but the instants of first tokens. Never so for a plan that
    speculates: its bounds must come down.
    """
    return (
        flight.selection is None
        and not ack.cached
        and ack.slots == flight.packed_slots
        and ack.computed == pack(flight.computed)
        and ack.emitted == pack(flight.emitted)
    )


def _shape_as_run(flight: Flight, did: Reported) -> BatchShape:
    """A decode computes its root and its drafts; a chunk computes all but what was cached."""
    decoded = flight.decode & (did.computed > 0)
    tokens = np.where(decoded, did.drafted + 1, did.computed - did.cached).astype(np.int32)
    has, ran = flight.has + did.cached, tokens > 0
    if np.count_nonzero(ran) == len(ran):
        return shape_of(has, tokens, flight.decode)
    return shape_of(has[ran], tokens[ran], flight.decode[ran])
