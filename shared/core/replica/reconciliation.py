"""The correction of the request table by acks: where the worker did not do what was predicted (a
stop, a skip, fewer or more accepted drafts, a prefix found in a cache, no room).
"""

from typing import NamedTuple

import numpy as np

from shared.columns import Indices, Ints, pack, unpack
from shared.core.replica.in_flight import InFlightPlan, shape_of
from shared.core.replica.prediction import Prediction
from shared.core.replica.request_table import RequestTable
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools, Drafts
from shared.schemas import PlanAck


class OutOfSync(Exception):
    """The request table differs from the worker's state: that must be read anew."""


class Reported(NamedTuple):
    """The worker's report of each entry of a plan; zeros where it skipped the entry."""

    computed: Ints
    emitted: Ints
    drafted: Ints
    cached: Ints


class Landing(NamedTuple):
    """An acked plan, as it was run."""

    shape: BatchShape  # of the iteration
    drafts: Drafts | None  # the yield of its speculation
    missed: int  # entries that did something not foreseen


class Reconciliation:
    """The request table and the plans in flight of one replica, as acks find them."""

    def __init__(
        self,
        table: RequestTable,
        ahead: Prediction,
        *,
        incarnation: str = "",
        epoch: int = 0,
        ack_seq: int = 0,
    ) -> None:
        self.ack_seq = ack_seq  # of the newest ack
        self._table, self._ahead = table, ahead
        self._incarnation, self._epoch = incarnation, epoch

    def is_next(self, ack: PlanAck) -> bool:
        """True if the ack is the next one; False if it came before, or if the resync's report
        includes it. Raises OutOfSync for any other.
        """
        if ack.incarnation != self._incarnation:
            raise OutOfSync("another incarnation")
        flights = self._ahead.flights
        planned = flights[0].packed_slots if flights else b""
        if not well_formed(ack, planned, self._table.capacity):
            raise OutOfSync("an ack whose columns do not fit")
        if ack.ack_seq <= self.ack_seq:
            return False
        if ack.ack_seq != self.ack_seq + 1:
            raise OutOfSync(f"ack {ack.ack_seq} came after {self.ack_seq}")
        expected = (self._epoch, flights[0].seq) if flights else None
        if ack.plan_seq and (ack.epoch, ack.plan_seq) != expected:
            raise OutOfSync(f"ack of plan {ack.plan_seq}, epoch {ack.epoch} was not expected")
        self.ack_seq = ack.ack_seq
        return True

    def reconcile(self, flight: InFlightPlan, ack: PlanAck) -> Landing:
        """Correct the table by what the worker did otherwise than predicted. Raises OutOfSync if it
        cannot have done that; nothing is corrected then.
        """
        table = self._table
        rows = table.row_of[flight.slots]  # until a row moves
        held: Bools = rows >= 0
        if _just_as_predicted(flight, ack):
            table.tokens_came(flight.makers, ack.ended_unix_s)
            if np.count_nonzero(flight.firsts):
                began = flight.firsts & held
                table.first_tokens_came(rows[began], flight.emitted[began], ack.ended_unix_s)
            return Landing(flight.shape, None, 0)
        did = reported(ack, flight, table.capacity)
        if beyond(did, flight) or self._too_far(flight, did, rows):
            raise OutOfSync("an ack of more than was planned")
        tbt_s, application = table.tbt_s[rows], table.application[rows]
        # the rows whose KV is still the one that this plan filled
        same: Bools = held & (table.restarts[rows] == flight.restarts)
        table.verified(rows[same], flight.unsure[same])
        table.tokens_came(flight.slots[did.emitted > 0], ack.ended_unix_s)
        if np.count_nonzero(flight.firsts):
            began = flight.firsts & held
            table.first_tokens_came(rows[began], did.emitted[began], ack.ended_unix_s)
        missed = self._correct(flight, did, held, same, ack.ended_unix_s)
        self._hold_kv(flight.slots[same])
        drafted = held & (did.drafted > 0)
        drafts = None
        if np.count_nonzero(drafted):
            accepted = np.maximum(did.emitted[drafted] - 1, 0)
            drafts = Drafts(tbt_s[drafted], application[drafted], did.drafted[drafted], accepted)
        return Landing(_shape_as_run(flight, did), drafts, missed)

    def _too_far(self, flight: InFlightPlan, did: Reported, rows: Indices) -> bool:
        """True if a prefill has more positions than its request has tokens."""
        prefills = (~flight.decode & (rows >= 0)).nonzero()[0]
        rows = rows[prefills]
        known = self._table.prompt_tokens[rows] + self._table.generated_tokens[rows]
        has = flight.has[prefills] + did.computed[prefills]
        return bool(np.count_nonzero(has > known))

    def _correct(
        self, flight: InFlightPlan, did: Reported, held: Bools, same: Bools, ended_unix_s: float
    ) -> int:
        """Correct every entry that did otherwise; return how many did something not foreseen."""
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

    def _accept(self, flight: InFlightPlan, did: Reported, same: Bools) -> Bools:
        """Add the accepted drafts of the entries that stayed within their bound and go on: most of
        those that speculate, so all at once. Returns which entries these are.
        """
        table, rows = self._table, self._table.row_of[flight.slots]
        extra = did.emitted - flight.emitted
        more: Bools = (
            same
            & flight.decode
            & (extra > 0)
            & (extra == did.computed - flight.computed)
            & (extra <= flight.unsure)
        )
        more[more] = table.generated_tokens[rows[more]] + extra[more] < table.max_tokens[rows[more]]
        if self._ahead.releasing:
            more &= ~np.isin(flight.slots, list(self._ahead.releasing))
        table.accept(rows[more], extra[more])
        return more

    def _correct_entry(
        self, flight: InFlightPlan, i: int, computed: int, emitted: int, same: bool
    ) -> bool:
        """One entry did otherwise than its row assumes. True if that was foreseen: more drafts were
        accepted than the one token counted.
        """
        table, slot = self._table, int(flight.slots[i])
        row = int(table.row_of[slot])
        extra = emitted - int(flight.emitted[i])
        moved = computed - int(flight.computed[i])
        foreseen = bool(0 < extra == moved <= flight.unsure[i])
        leaves = slot in self._ahead.releasing
        table.recount(row, extra, leaves=leaves)
        if leaves or not same:  # without `same` it was preempted since
            return True
        table.reach(row, max(int(table.computed_tokens[row]) + moved, 0))
        return foreseen

    # ------------------------------------------------------------ a prefill at another position

    def _predict_again(
        self, flight: InFlightPlan, i: int, computed: int, emitted: int, ended_unix_s: float
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
        table, slot = self._table, int(flight.slots[i])
        row = int(table.row_of[slot])
        behind = [
            (later, int(j))
            for later in self._ahead.flights
            for j in np.flatnonzero(later.slots == slot)
            if later.restarts[j] == table.restarts[row]
        ]
        taken_back = [(flight, i), *behind]
        table.take_back(
            row,
            sum(int(each.emitted[j]) for each, j in taken_back),
            first=any(each.firsts[j] for each, j in taken_back),
        )
        has = int(flight.has[i]) + computed
        flight.firsts[i] = bool(emitted) and table.make_token(row, ended_unix_s)
        for later, j in behind:
            known = int(table.prompt_tokens[row] + table.generated_tokens[row])
            decode = bool(table.generated_tokens[row] > 0 and has == known - 1)
            left, cap = known - has, int(later.caps[j])
            computed = 1 if decode else min(cap, left)
            later.predict_entry(j, has, computed, int(left <= cap), decode)
            has += computed
            later.firsts[j] = left <= cap and table.make_token(row, later.end_unix_s)
        if has > table.computed_tokens[row]:
            table.kv.overdraw()
        table.reach(row, has)

    # ------------------------------------------------------------ parts of every correction

    def _hold_kv(self, slots: Indices) -> None:
        """Hold what these slots may still fill: after all plans in flight, and at the peak of each
        of them.
        """
        table = self._table
        rows = table.row_of[slots]
        after = table.computed_tokens[rows] + table.unsure_tokens[rows]
        top = after.copy()
        # the positions that the draft model may have of these slots, at the peak of each plan in
        # flight and after it
        draft_top = table.draft_tokens[rows] if table.draft_kv_blocks else None
        for flight in reversed(self._ahead.flights):
            at = positions(flight.slots, slots, table.capacity)
            runs = at >= 0
            runs[runs] = flight.restarts[at[runs]] == table.restarts[rows[runs]]
            before = after.copy()
            before[runs] -= (flight.computed + flight.unsure)[at[runs]]
            top[runs] = np.maximum(top[runs], before[runs] + flight.caps[at[runs]])
            if draft_top is not None:
                drafts = runs.copy()
                drafts[runs] = flight.draft_caps[at[runs]] > 0
                peak = before[drafts] + flight.draft_caps[at[drafts]]
                draft_top[drafts] = np.maximum(draft_top[drafts], np.maximum(peak, after[drafts]))
            after = before
        table.hold_kv(rows, top, draft_top)


def _just_as_predicted(flight: InFlightPlan, ack: PlanAck) -> bool:
    """True if only the instants of first tokens must be corrected. Never true for a plan that
    speculates, since its bounds must come down.
    """
    return (
        flight.selection is None
        and ack.cached == flight.cached
        and ack.slots == flight.packed_slots
        and ack.computed == pack(flight.computed)
        and ack.emitted == pack(flight.emitted)
    )


def _shape_as_run(flight: InFlightPlan, did: Reported) -> BatchShape:
    """The shape that ran: decodes compute root and drafts, chunks all that was not cached."""
    decoded = flight.decode & (did.computed > 0)
    tokens = np.where(decoded, did.drafted + 1, did.computed - did.cached).astype(np.int32)
    has, ran = flight.has + did.cached, tokens > 0
    if np.count_nonzero(ran) == len(ran):
        return shape_of(has, tokens, flight.decode)
    return shape_of(has[ran], tokens[ran], flight.decode[ran])


# ---------------------------------------------------------------- columns of an ack


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
