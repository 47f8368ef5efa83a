"""The predicted replica: its request table, with the effects of the plans in flight written in.

Predicted = confirmed + what the plans in flight will do. Sending a plan writes its effects into the
table; its ack changes them only where the worker did something else (reconciliation.py).
"""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shared.columns import EMPTY, NOWHERE, Indices, Ints, pack, unpack
from shared.core.replica.events import Leapt
from shared.core.replica.in_flight import InFlightPlan, shape_of
from shared.core.replica.request_table import RequestTable
from shared.core.replica.table_rows import DECODE
from shared.perf.draft_correction import DraftCorrection
from shared.perf.iteration_time import Profile
from shared.policy.seam import Bools, Choice, Speculation
from shared.policy.speculation import draft_room, draft_s
from shared.schemas import Selection


class Entries(NamedTuple):
    """The part of a choice that can run. `cut`: some entries had to go for want of KV, so what was
    chosen to follow no longer fits.
    """

    slots: Indices
    caps: Ints
    speculation: Speculation | None
    blocks: Ints  # KV blocks that the entries newly take, at most
    cut: bool = False


NO_ENTRIES = Entries(NOWHERE, EMPTY, None, EMPTY)


class Drafting(NamedTuple):
    """The speculation of one plan. Columns run along its entries."""

    computed: Ints  # KV positions that each entry fills for good, at least
    unsure: Ints  # tokens that it may make beyond the one that is certain
    verified: Ints  # tokens it is likely to verify
    draft_caps: Ints  # positions that it may fill in the draft model's KV
    seconds: float  # that the draft model takes
    selection: Selection | None
    begins: bool = False  # the draft model has nothing of some request yet


class Prediction:
    """The request table and the plans in flight of one replica, from one resync to the next."""

    def __init__(
        self, table: RequestTable, draft: DraftCorrection, *, chains: bool = False
    ) -> None:
        """`chains`: the engine drafts for all requests as deep as for the deepest."""
        self._table = table
        self._draft = draft
        self._chains = chains
        self.flights: deque[InFlightPlan] = deque()
        # slots whose end is in flight: their rows are not corrected any more
        self.releasing: set[int] = set()
        # blocks dropped by the orders of the plan that is being made
        self._dropped_blocks = self._dropped_draft_blocks = 0

    # ------------------------------------------------------------ before a plan is sent

    def entries(self, choice: Choice) -> Entries:
        """The entries of the choice whose requests are still here and that fit the free blocks, cut
        from the end.

        Caps are lowered to the positions that each request has left, so that no KV is asked for or
        taken beyond what was counted.
        """
        cut = False
        table, slots, caps, speculation = self._table, choice.slots, choice.caps, choice.speculation
        if not len(slots):
            return NO_ENTRIES
        rows = table.row_of[slots]
        kept: Bools = table.plannable(rows)
        if np.count_nonzero(kept) < len(kept):
            slots, caps, rows = slots[kept], caps[kept], rows[kept]
            speculation = None if speculation is None else speculation.along(kept)
            if not len(slots):
                return NO_ENTRIES
        decode = table.phase[rows] == DECODE
        drafts: Ints | int = 1
        # never past a request's end: a request that runs alone must find KV for its last tokens
        if speculation is not None:
            owed = table.max_tokens[rows] - table.generated_tokens[rows] - table.unsure_tokens[rows]
            speculation = self._within_draft_kv(rows, decode, speculation)
            drafts = np.maximum(np.where(speculation.depth > 0, np.minimum(caps, owed), 1), 1)
        left = np.where(decode, drafts, table.target_tokens[rows] - table.computed_tokens[rows])
        caps = np.minimum(caps, left).astype(np.int32)
        blocks = table.blocks_for(rows, caps)
        if blocks.sum() > (free_blocks := table.kv_free_blocks()):
            kept = blocks.cumsum() <= free_blocks
            slots, caps, blocks = slots[kept], caps[kept], blocks[kept]
            speculation = None if speculation is None else speculation.along(kept)
            cut = True
        return Entries(slots, caps, speculation, blocks, cut)

    def _within_draft_kv(
        self, rows: Indices, decode: Bools, speculation: Speculation
    ) -> Speculation:
        """The same entries, of which fewer draft where the draft model's KV has no room for all.
        They claim it in order; an entry that needs no further blocks goes on drafting.
        """
        table = self._table
        if not table.draft_kv_blocks:
            return speculation
        depth = np.where(decode, speculation.depth, 0)
        blocks = table.draft_blocks_for(rows, draft_room(depth, speculation.width))
        blocks[depth == 0] = 0
        left_blocks = table.draft_free_blocks()
        if int(blocks.sum()) <= left_blocks:
            return speculation
        depth = speculation.depth.copy()
        for entry, wanted in enumerate(blocks.tolist()):
            if wanted > left_blocks:
                depth[entry] = 0
            else:
                left_blocks -= wanted
        return replace(speculation, depth=depth)

    def release(self, slot: int) -> None:
        """The worker frees the slot before the plan's entries run: its KV counts as free now."""
        row = int(self._table.row_of[slot])
        self._count_dropped(row)
        self._table.drop_kv(row)
        self.releasing.add(slot)
        self._table.leave(slot)

    def preempt(self, slot: int) -> None:
        """The slot loses its KV and keeps its tokens: it must compute all of them again."""
        row = int(self._table.row_of[slot])
        self._count_dropped(row)
        self._table.restart(row)

    def _count_dropped(self, row: int) -> None:
        self._dropped_blocks += int(self._table.kv_held_blocks[row])
        self._dropped_draft_blocks += int(self._table.draft_held_blocks[row])

    # ------------------------------------------------------------ a plan is sent

    def launch(
        self, seq: int, entries: Entries, start_unix_s: float, profile: Profile
    ) -> InFlightPlan:
        """Write into the table what these entries will do; return the plan in flight.

        The table says what becomes of an entry's row. `.`: the column stays; `+ x`: it grows by x;
        x: it becomes x. `chunk` leaves some of the prompt, `last chunk` ends it and makes token 1.
        `no TTFT` is a last chunk whose SLO has only a pace, so that deadlines count from token 1.
        `resumed` is a last chunk of a request that has made tokens before. `end` is the predicted
        end of the plan, `c` is `computed_tokens` before it.

          column              | chunk    | last chunk | no TTFT     | resumed  | decode   | drafting
          --------------------+----------+------------+-------------+----------+----------+---------
          phase               | PREFILL  | DECODE     | DECODE      | DECODE   | .        | .
          computed_tokens     | + cap    | + cap      | + cap       | + cap    | + 1      | + 1
          generated_tokens    | .        | + 1        | + 1         | + 1      | + 1      | + 1
          unsure_tokens       | .        | .          | .           | .        | .        | + unsure
          draft_tokens        | .        | .          | .           | .        | .        | c + 1
          first_token_unix_s  | .        | end        | end         | .        | .        | .
          newest_token_unix_s | .        | end        | end         | end      | end      | end
          next_due_unix_s     | .        | + tbt_s    | end + tbt_s | + tbt_s  | + tbt_s  | + tbt_s
          kv_held_blocks      | + blocks | + blocks   | + blocks    | + blocks | + blocks | + blocks

        `newest_token_unix_s` is written when a view is made (`date_newest_tokens`). A row that has
        made its last token (generated_tokens = max_tokens) leaves the live rows. What a request
        that begins is expected to find in a prefix cache is in `c` already.
        """
        slots, caps, speculation, blocks, _ = entries
        table = self._table
        rows = table.row_of[slots]
        decode: Bools = table.phase[rows] == DECODE
        has, restarts = table.computed_tokens[rows], table.restarts[rows]
        expected = table.expected(rows)
        drafting = (
            Drafting(caps, nothing := np.zeros(len(caps), dtype=np.int32), caps, nothing, 0.0, None)
            if speculation is None
            else self._drafting(rows, caps, decode, speculation)
        )
        shape = shape_of(has, drafting.verified, decode)
        load_s = 0.0 if expected is None else table.begin_loads(rows)
        predicted_s = profile.batch_s(shape) + drafting.seconds + load_s
        end_unix_s = start_unix_s + predicted_s
        table.advance(rows, drafting.computed, blocks)
        emitted, firsts = decode, np.zeros(len(rows), dtype=np.bool_)
        if shape.prefills:
            emitted, firsts = table.end_chunks(rows, decode, end_unix_s)
        all_emit = len(rows) == shape.decodes
        table.make_tokens(rows if all_emit else rows[emitted])
        computed = drafting.computed
        if expected is not None:  # these begin at 0
            has, computed = has - expected, computed + expected
        flight = InFlightPlan(
            seq=seq,
            slots=slots,
            packed_slots=pack(slots),
            computed=computed,
            emitted=emitted.astype(np.int32),
            makers=slots if all_emit else slots[emitted],
            unsure=drafting.unsure,
            selection=drafting.selection,
            draft_caps=drafting.draft_caps,
            caps=caps,
            asked=caps,
            has=has,
            decode=decode,
            firsts=firsts,
            restarts=restarts,
            shape=shape,
            draft_s=drafting.seconds,
            load_s=load_s,
            draft_begins=drafting.begins,
            predicted_s=predicted_s,
            end_unix_s=end_unix_s,
            follows=bool(self.flights),
            dropped_blocks=self._dropped_blocks,
            dropped_draft_blocks=self._dropped_draft_blocks,
            expected=expected,
        )
        self._dropped_blocks = self._dropped_draft_blocks = 0
        self.flights.append(flight)
        return flight

    def _drafting(
        self, rows: Indices, caps: Ints, decode: Bools, speculation: Speculation
    ) -> Drafting:
        """Write the speculation of these entries into the table, and return it."""
        table = self._table
        depth: Ints = np.where(decode, speculation.depth, 0).astype(np.int32, copy=False)
        computed: Ints = np.where(decode, 1, caps)
        unsure: Ints = np.minimum(caps - computed, depth)
        drafts: Bools = depth > 0
        if not np.count_nonzero(drafts):
            return Drafting(computed, unsure, caps, depth, 0.0, None)
        drafting = drafts.nonzero()[0]
        those = rows[drafting]
        verified = _within_budget(caps, drafting, speculation.budget_tokens)
        draft_caps = np.where(drafts, draft_room(depth, speculation.width), 0)
        begins = not table.draft_tokens[those].all()
        has, had_unsure = table.computed_tokens[those], table.unsure_tokens[those]
        # the draft model made the unsure tokens itself
        missing = has + 1 - np.minimum(table.draft_tokens[those], has)
        seconds = self._draft_s(
            has + 1 + had_unsure, missing, depth[drafting], speculation.width[drafting]
        )
        table.draft(those, draft_caps[drafting], unsure[drafting])
        selection = _selection(speculation, depth)
        return Drafting(computed, unsure, verified, draft_caps, seconds, selection, begins)

    def _draft_s(self, context: Ints, missing: Ints, depth: Ints, width: Ints) -> float:
        """The seconds of drafting for requests of these contexts (in tokens), of which the draft
        model's KV lacks `missing`.
        """
        draft = self._draft.now
        assert draft is not None, "speculation without a draft model"
        return draft_s(
            draft, depth=depth, width=width, context=context, missing=missing, together=self._chains
        )

    # ------------------------------------------------------------ while plans are in flight

    def share(self, blocks: int, draft_blocks: int) -> None:
        """After the newest acked plan, sharing saved the worker this many blocks, and this many of
        the draft model's. All blocks that the plans in flight drop may be among them.
        """
        blocks -= self._dropped_blocks
        draft_blocks -= self._dropped_draft_blocks
        for flight in self.flights:
            blocks -= flight.dropped_blocks
            draft_blocks -= flight.dropped_draft_blocks
        self._table.share(blocks, draft_blocks)

    def overcounted(self, slot: int) -> int:
        """Output tokens of the slot that the table already counts and plans in flight have still to
        make.
        """
        return sum(int(flight.emitted[flight.slots == slot].sum()) for flight in self.flights)

    @property
    def misses_an_end(self) -> bool:
        """True if a row is no longer live and no plan in flight can bring its end: then the worker
        expects another end, and would hold the request for ever.
        """
        table = self._table
        if table.used == table.live:
            return False
        slots = set(table.slot[table.live : table.used].tolist())
        if self.flights:
            slots -= self.releasing
        for flight in self.flights:
            slots.difference_update(flight.slots.tolist())
        return bool(slots)

    def date_newest_tokens(self) -> None:
        """Write into the live rows when the newest token of each comes: at the predicted end of the
        last plan in flight that makes one, or when its newest acked one came.
        """
        self._table.date_newest_tokens(
            (flight.makers, flight.end_unix_s) for flight in self.flights
        )

    def retime(self, end_unix_s: float, profile: Profile) -> None:
        """An iteration ended at this instant: the predicted ends of the plans behind it move."""
        for flight in self.flights:
            if flight.reshaped:
                beside_s = flight.draft_s + flight.load_s
                flight.predicted_s = profile.batch_s(flight.shape) + beside_s
                flight.reshaped = False
            end_unix_s += flight.predicted_s
            flight.end_unix_s = end_unix_s

    def check(self, depth: int) -> None:
        """Raises AssertionError for more than `depth` plans, or one that has a request twice."""
        assert len(self.flights) <= depth
        for flight in self.flights:
            assert len(set(flight.slots.tolist())) == len(flight.slots), "a request twice in a plan"

    def leap(self, event: Leapt, profile: Profile) -> None:
        """The plan in flight has run several times, each time as predicted but for accepted drafts,
        and runs once more. None of its prefills has ended.
        """
        table, flight = self._table, self.flights[0]
        rows = table.row_of[flight.slots]
        assert not np.count_nonzero(flight.firsts)
        table.tokens_came(flight.makers, event.ended_unix_s)
        if flight.selection is None:
            self._leap(flight, rows, event.iterations)
        else:
            self._leap_drafting(flight, flight.selection, rows, event)
        flight.predicted_s = profile.batch_s(flight.shape) + flight.draft_s
        flight.end_unix_s = event.ended_unix_s + flight.predicted_s

    def _leap(self, flight: InFlightPlan, rows: Indices, iterations: int) -> None:
        table = self._table
        table.advance(rows, iterations * flight.computed, 0)
        table.hold_kv(rows, table.computed_tokens[rows])
        table.make_tokens(rows[flight.decode], iterations)
        flight.has = flight.has + iterations * flight.computed
        flight.shape = shape_of(flight.has, flight.caps, flight.decode)

    def _leap_drafting(
        self, flight: InFlightPlan, selection: Selection, rows: Indices, event: Leapt
    ) -> None:
        drafting = (flight.draft_caps > 0).nonzero()[0]
        made = np.array([each.made for each in event.drafted])
        flight.has = flight.has + made.sum(axis=0, dtype=np.int32)
        self._table.leap_drafting(rows, made, drafting, flight.has + flight.caps)
        verified = _within_budget(flight.caps, drafting, selection.budget_tokens)
        flight.shape = shape_of(flight.has, verified, flight.decode)
        context, missing = flight.has[drafting] + 1, np.ones(len(drafting), dtype=np.int32)
        columns = unpack(selection.depth)[drafting], unpack(selection.width)[drafting]
        flight.draft_s = self._draft_s(context, missing, *columns)
        flight.draft_begins = False


def _within_budget(caps: Ints, drafting: Indices, budget_tokens: int) -> Ints:
    """The tokens that are likely to be verified: the caps, shrunk evenly where the sum of those
    that draft exceeds the budget that they share.
    """
    drafts = caps[drafting] - 1
    drafted = int(drafts.sum())
    room = max(budget_tokens - len(drafting), 0)
    if drafted <= room:
        return caps
    verified = caps.copy()
    verified[drafting] = 1 + np.rint(drafts * (room / drafted)).astype(np.int32)
    return verified


def _selection(speculation: Speculation, depth: Ints) -> Selection:
    return Selection(
        method=speculation.method,
        depth=pack(depth),
        width=pack(speculation.width),
        budget_tokens=speculation.budget_tokens,
        needed_limit_tokens=speculation.needed_limit_tokens,
        lasts_s=speculation.lasts_s,
    )
