"""What a replica will be: its books, with what the plans in flight will do already written in, and
put right by their acks.

Predicted = confirmed + what the plans in flight will do. A plan's effects are written into the
books when it is sent; its ack changes them only where the worker did something else (a stop, a
skip, fewer or more accepted drafts).
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.columns import EMPTY, Ints, pack, unpack
from shared.core.books import Books
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools, Choice, Drafts, Phase, Speculation
from shared.policy.speculation import draft_s
from shared.schemas import PlanAck, Selection

# numpy takes an IntEnum five times as slowly
PREFILL, DECODE = int(Phase.PREFILL), int(Phase.DECODE)


class Entries(NamedTuple):
    """What of a choice can run; `cut`: some had to go for want of KV, so what was chosen to follow
    no longer fits.
    """

    slots: Ints
    caps: Ints
    speculation: Speculation | None
    blocks: Ints  # that they newly take, at their upper bound
    cut: bool = False


NO_ENTRIES = Entries(EMPTY, EMPTY, None, EMPTY)


class Landing(NamedTuple):
    """An acked flight: the batch as it was run, what its drafts did, and how many entries did what
    nobody foresaw.
    """

    shape: BatchShape
    drafts: Drafts | None
    missed: int


@dataclass(slots=True)
class Flight:
    """A plan sent and not yet acked, with what the books already assume of it."""

    seq: int
    slots: Ints
    packed_slots: bytes  # as they are in the plan and, if all ran, in the ack
    computed: Ints  # predicted
    emitted: Ints  # predicted
    unsure: Ints
    selection: Selection | None
    caps: Ints  # KV positions it may fill while it runs, rejected drafts included
    has: Ints  # KV positions before it
    decode: Bools
    firsts: Bools  # entries that make their request's first token
    restarts: Ints  # books.restarts when it was sent
    shape: BatchShape
    draft_s: float
    predicted_s: float
    end_unix_s: float  # predicted
    # sent while another was with the worker: with a longer lead it would have been there sooner
    follows: bool
    otherwise: bool = False  # its shape is another since its time was predicted

    def land_otherwise(
        self, entry: int, has: int, computed: int, emitted: int, decode: bool
    ) -> None:
        """One entry is now predicted to do this."""
        # until now they may be the same
        self.computed, self.caps = self.computed.copy(), self.caps.copy()
        self.has[entry], self.computed[entry], self.emitted[entry], self.decode[entry] = (
            has,
            computed,
            emitted,
            decode,
        )
        if not self.unsure[entry]:
            self.caps[entry] = computed
        if self.selection is None:
            self.shape, self.otherwise = _shape(self.has, self.computed, self.decode), True


class Prediction:
    """Books and flights of one replica, from one resync to the next."""

    def __init__(self, books: Books, draft: Profile | None) -> None:
        self._books = books
        self._draft = draft
        self.flights: deque[Flight] = deque()
        # slots whose end is in flight: nothing of them is corrected any more
        self.releasing: set[int] = set()

    # ------------------------------------------------------------ sending

    def entries(self, choice: Choice) -> Entries:
        """Those of the choice that can run: of requests still here, and within the free blocks, cut
        from the end.

        Caps come down to what is left of each, so that KV is neither asked for nor taken beyond
        what was counted.
        """
        cut = False
        books, slots, caps, speculation = self._books, choice.slots, choice.caps, choice.speculation
        if not len(slots):
            return NO_ENTRIES
        rows = books.row_of[slots]
        kept: Bools = (rows >= 0) & (rows < books.live)
        if not kept.all():
            slots, caps, rows = slots[kept], caps[kept], rows[kept]
            speculation = None if speculation is None else speculation.along(kept)
            if not len(slots):
                return NO_ENTRIES
        decode = books.phase[rows] == DECODE
        drafts: Ints | int = 1
        # never past a request's end: who runs alone must find KV for its last tokens
        if speculation is not None:
            owed = books.max_tokens[rows] - books.generated_tokens[rows] - books.unsure_tokens[rows]
            drafts = np.maximum(np.where(speculation.depth > 0, np.minimum(caps, owed), 1), 1)
        left = np.where(decode, drafts, books.target_tokens[rows] - books.computed_tokens[rows])
        caps = np.minimum(caps, left).astype(np.int32)
        blocks = books.blocks_for(rows, caps)
        if blocks.sum() > (free_blocks := books.kv_free_blocks()):
            kept = blocks.cumsum() <= free_blocks
            slots, caps, blocks = slots[kept], caps[kept], blocks[kept]
            speculation = None if speculation is None else speculation.along(kept)
            cut = True
        return Entries(slots, caps, speculation, blocks, cut)

    def release(self, slot: int) -> None:
        """The worker frees it before the plan's entries run, so its KV counts as free from here."""
        self._books.drop_kv(int(self._books.row_of[slot]))
        self.releasing.add(slot)
        self._books.leave(slot)

    def preempt(self, slot: int) -> None:
        """Its KV goes, its tokens stay: it must compute all of them again."""
        books = self._books
        row = int(books.row_of[slot])
        books.target_tokens[row] = books.prompt_tokens[row] + books.generated_tokens[row]
        books.drop_kv(row)
        books.phase[row] = Phase.WAITING

    def overcounted(self, slot: int) -> int:
        """Output tokens of the slot that the books already count and plans in flight have still to
        make.
        """
        return sum(int(flight.emitted[flight.slots == slot].sum()) for flight in self.flights)

    def retime(self, end_unix_s: float, profile: Profile) -> None:
        """An iteration ended at this instant: the clock of the plans behind it moves."""
        for flight in self.flights:
            if flight.otherwise:
                flight.predicted_s, flight.otherwise = (
                    profile.batch_s(flight.shape) + flight.draft_s,
                    False,
                )
            end_unix_s += flight.predicted_s
            flight.end_unix_s = end_unix_s

    def launch(self, seq: int, entries: Entries, start_unix_s: float, profile: Profile) -> Flight:
        """Write into the books what these entries will do; the flight that remembers it."""
        slots, caps, speculation, blocks, _ = entries
        books = self._books
        rows = books.row_of[slots]
        decode: Bools = books.phase[rows] == DECODE
        has, restarts = books.computed_tokens[rows], books.restarts[rows]
        computed, unsure, verified, drafted_s, selection = (
            caps,
            np.zeros_like(caps),
            caps,
            0.0,
            None,
        )
        if speculation is not None:
            depth: Ints = np.where(decode, speculation.depth, 0).astype(np.int32)
            drafting: Bools = depth > 0
            computed = np.where(decode, 1, caps).astype(np.int32)
            unsure = np.minimum(caps - computed, depth)
            if drafting.any():
                verified = _within_budget(caps, drafting, speculation.budget_tokens)
                drafted_s = self._draft_s(
                    rows[drafting], depth[drafting], speculation.width[drafting], has[drafting]
                )
                selection = _selection(speculation, depth)
                books.unsure_tokens[rows] += unsure
                books.draft_tokens[rows[drafting]] = has[drafting] + 1
        shape = _shape(has, verified, decode)
        predicted_s = profile.batch_s(shape) + drafted_s
        end = start_unix_s + predicted_s

        books.kv_held_blocks[rows] += blocks
        ahead = has + computed
        books.computed_tokens[rows] = ahead
        emitted, firsts = decode, np.zeros(len(rows), dtype=np.bool_)
        if shape.prefills:
            emitted = decode | (ahead >= books.target_tokens[rows])
            # A prefill on its way leaves WAITING; one that ends becomes a decode.
            books.phase[rows] = np.where(emitted, DECODE, PREFILL)
            if len(begun := (emitted & ~decode).nonzero()[0]):
                firsts = emitted & np.isinf(books.first_token_unix_s[rows])
                books.first_token_unix_s[rows[firsts]] = end
                self._anchor(rows[begun], end)
        made = rows if len(rows) == shape.decodes else rows[emitted]
        books.next_due_unix_s[made] += books.tbt_s[made]  # deadlines are cumulative
        generated = books.generated_tokens[made] + 1
        books.generated_tokens[made] = generated
        for slot in books.slot[made[generated >= books.max_tokens[made]]].tolist():
            books.leave(slot)
        flight = Flight(
            seq=seq,
            slots=slots,
            packed_slots=pack(slots),
            computed=computed,
            emitted=emitted.astype(np.int32),
            unsure=unsure,
            selection=selection,
            caps=caps,
            has=has,
            decode=decode,
            firsts=firsts,
            restarts=restarts,
            shape=shape,
            draft_s=drafted_s,
            predicted_s=predicted_s,
            end_unix_s=end,
            follows=bool(self.flights),
        )
        self.flights.append(flight)
        return flight

    def leap(self, iterations: int, ended_unix_s: float, profile: Profile) -> None:
        """The flight has landed so often, each time just as predicted, and is in the air once more;
        no prefill of it has ended.
        """
        books, flight = self._books, self.flights[0]
        rows = books.row_of[flight.slots]
        assert flight.selection is None and not flight.firsts.any()
        books.computed_tokens[rows] += iterations * flight.computed
        books.kv_held_blocks[rows] = -(-books.computed_tokens[rows] // books.block_tokens)
        made = rows[flight.decode]
        books.next_due_unix_s[made] += iterations * books.tbt_s[made]
        books.generated_tokens[made] += iterations
        for slot in books.slot[
            made[books.generated_tokens[made] >= books.max_tokens[made]]
        ].tolist():
            books.leave(slot)
        flight.has = flight.has + iterations * flight.computed
        flight.shape = _shape(flight.has, flight.caps, flight.decode)
        flight.predicted_s = profile.batch_s(flight.shape)
        flight.end_unix_s = ended_unix_s + flight.predicted_s

    def _draft_s(self, rows: Ints, depth: Ints, width: Ints, has: Ints) -> float:
        assert self._draft is not None, "speculation without a draft model"
        context = has + self._books.unsure_tokens[rows] + 1
        # what is unsure, the draft made itself
        missing = has + 1 - np.minimum(self._books.draft_tokens[rows], has)
        return draft_s(self._draft, depth=depth, width=width, context=context, missing=missing)

    def _anchor(self, rows: Ints, at_unix_s: float) -> None:
        """Without a TTFT the pace of these, whose prefill ends now, counts from their first
        token.
        """
        books = self._books
        free = rows[np.isinf(books.next_due_unix_s[rows]) & (books.generated_tokens[rows] == 0)]
        books.next_due_unix_s[free] = at_unix_s

    # ------------------------------------------------------------ reconciliation

    def reconcile(self, flight: Flight, ack: PlanAck) -> Landing:
        """Correct the books by what the worker did otherwise than predicted; the batch as it was
        run.
        """
        books = self._books
        rows = books.row_of[flight.slots]  # until a row moves
        held = rows >= 0
        speculated = flight.selection is not None
        exact = (
            ack.slots == flight.packed_slots
            and ack.computed == pack(flight.computed)
            and ack.emitted == pack(flight.emitted)
        )
        if exact and not speculated and not ack.cached:
            if np.count_nonzero(flight.firsts):
                began = flight.firsts & held
                self._first_tokens(rows[began], flight.emitted[began], ack.ended_unix_s)
            return Landing(flight.shape, None, 0)
        tbt_s, application = books.tbt_s[rows], books.application[rows]
        # its KV is still the one that this plan filled
        same = held & (books.restarts[rows] == flight.restarts)
        books.unsure_tokens[rows[same]] -= flight.unsure[same]
        computed, emitted, drafted, cached = _told(ack, flight, books.capacity)
        if flight.firsts.any():
            self._first_tokens(
                rows[flight.firsts & held], emitted[flight.firsts & held], ack.ended_unix_s
            )
        missed = 0
        otherwise = held & ((computed != flight.computed) | (emitted != flight.emitted))
        if flight.selection is not None:
            otherwise &= ~self._accept(flight, rows, computed, emitted, same)
        for i in np.flatnonzero(otherwise).tolist():
            slot, did = int(flight.slots[i]), (int(computed[i]), int(emitted[i]))
            if (
                same[i]
                and not flight.decode[i]
                and did[0] != flight.computed[i]
                and slot not in self.releasing
            ):
                self._go_on_from(slot, flight, i, did, ack.ended_unix_s)
                missed += 1
            else:
                missed += not self._correct(slot, flight, i, *did, bool(same[i]))
        self._hold_kv(flight.slots[same])
        tokens = np.where(flight.decode & (computed > 0), drafted + 1, computed - cached).astype(
            np.int32
        )
        ran, has = tokens > 0, flight.has + cached
        shape = (
            _shape(has, tokens, flight.decode)
            if ran.all()
            else _shape(has[ran], tokens[ran], flight.decode[ran])
        )
        told = held & (drafted > 0)
        if not told.any():
            return Landing(shape, None, missed)
        return Landing(
            shape,
            Drafts(tbt_s[told], application[told], drafted[told], np.maximum(emitted[told] - 1, 0)),
            missed,
        )

    def _accept(
        self, flight: Flight, rows: Ints, computed: Ints, emitted: Ints, same: Bools
    ) -> Bools:
        """Entries that did more than the one token counted, within the bound, and go on: most of
        those that speculate, so all at once.

        What is accepted is in the draft's KV too (of a draft accepted to its last token, but for
        that one).
        """
        assert flight.selection is not None
        books, extra = self._books, emitted - flight.emitted
        more: Bools = (
            same
            & flight.decode
            & (extra > 0)
            & (extra == computed - flight.computed)
            & (extra <= flight.unsure)
        )
        more[more] = books.generated_tokens[rows[more]] + extra[more] < books.max_tokens[rows[more]]
        if self.releasing:
            more &= ~np.isin(flight.slots, list(self.releasing))
        ours, extra = rows[more], extra[more]
        books.generated_tokens[ours] += extra
        books.computed_tokens[ours] += extra
        books.draft_tokens[ours] += extra
        books.next_due_unix_s[ours] += extra * books.tbt_s[ours]
        return more

    def _correct(
        self, slot: int, flight: Flight, i: int, computed: int, emitted: int, same: bool
    ) -> bool:
        """One entry did otherwise than its row assumes. True if that was foreseen: more drafts
        accepted than the one token counted.
        """
        books = self._books
        row = int(books.row_of[slot])
        extra, moved = emitted - int(flight.emitted[i]), computed - int(flight.computed[i])
        foreseen = bool(0 < extra == moved <= flight.unsure[i])
        books.generated_tokens[row] += extra
        if slot in self.releasing:
            return True
        if math.isfinite(books.next_due_unix_s[row]):
            books.next_due_unix_s[row] += extra * books.tbt_s[row]
        known = books.prompt_tokens[row] + books.generated_tokens[row]
        if not same:  # preempted since: only what must be computed again has changed
            if books.phase[row] != Phase.DECODE:
                books.target_tokens[row] = known
            return True
        books.computed_tokens[row] = max(books.computed_tokens[row] + moved, 0)
        if books.computed_tokens[row] < known - 1 or books.generated_tokens[row] == 0:
            books.target_tokens[row] = known
            books.phase[row] = Phase.PREFILL if books.computed_tokens[row] else Phase.WAITING
        else:
            books.phase[row] = Phase.DECODE
        if books.generated_tokens[row] < books.max_tokens[row]:
            books.come_back(slot)
        else:
            books.leave(slot)
        return foreseen

    def _go_on_from(
        self, slot: int, flight: Flight, i: int, did: tuple[int, int], ended_unix_s: float
    ) -> None:
        """A prefill got further than planned, by what a prefix cache had of it, or nowhere for want
        of room: the next plans begin there.

        What they were predicted to do of it is taken back, and predicted again.
        """
        books, row = self._books, int(self._books.row_of[slot])
        steps = [(flight, i, ended_unix_s)]
        for later in self.flights:
            steps += [
                (later, int(j), later.end_unix_s)
                for j in np.flatnonzero(later.slots == slot)
                if later.restarts[j] == books.restarts[row]
            ]
        predicted = sum(int(step.emitted[j]) for step, j, _ in steps)
        books.generated_tokens[row] -= predicted
        if predicted and math.isfinite(books.tbt_s[row]):
            books.next_due_unix_s[row] -= predicted * books.tbt_s[row]
        elif not books.generated_tokens[row]:
            books.next_due_unix_s[row] = books.first_due_unix_s[row]
        if any(step.firsts[j] for step, j, _ in steps):
            books.first_token_unix_s[row] = math.inf
            if math.isinf(books.first_due_unix_s[row]):
                books.next_due_unix_s[row] = math.inf  # it was anchored at that token
        has = int(flight.has[i])
        for step, j, end_unix_s in steps:
            known = int(books.prompt_tokens[row] + books.generated_tokens[row])
            decode = step is not flight and books.generated_tokens[row] > 0 and has == known - 1
            computed, emitted = (
                did
                if step is flight
                else (min(int(step.caps[j]), known - has), int(known - has <= step.caps[j]))
            )
            if step is not flight:
                step.land_otherwise(j, has, 1 if decode else computed, emitted, decode)
            has += 1 if decode else computed
            step.firsts[j] = emitted and math.isinf(books.first_token_unix_s[row])
            if emitted:
                if step.firsts[j]:
                    books.first_token_unix_s[row] = end_unix_s
                if math.isinf(books.next_due_unix_s[row]) and not books.generated_tokens[row]:
                    books.next_due_unix_s[row] = end_unix_s
                books.generated_tokens[row] += 1
                books.next_due_unix_s[row] += books.tbt_s[row]
        known = int(books.prompt_tokens[row] + books.generated_tokens[row])
        books.overdrawn = books.overdrawn or has > books.computed_tokens[row]
        books.computed_tokens[row] = has
        decoding = books.generated_tokens[row] > 0 and has == known - 1
        books.phase[row] = DECODE if decoding else PREFILL if has else Phase.WAITING
        if not decoding:
            books.target_tokens[row] = known
        if books.generated_tokens[row] < books.max_tokens[row]:
            books.come_back(slot)
        else:
            books.leave(slot)

    def _first_tokens(self, rows: Ints, emitted: Ints, at_unix_s: float) -> None:
        """They were predicted; this is when they came, if they did. A pace without a TTFT counts
        from there.
        """
        books = self._books
        anchored = np.isinf(books.first_due_unix_s[rows]) & np.isfinite(books.tbt_s[rows])
        instant = np.where(emitted > 0, at_unix_s, math.inf)
        shift = instant - books.first_token_unix_s[rows]
        books.next_due_unix_s[rows[anchored]] += shift[anchored]
        books.first_token_unix_s[rows] = instant

    def _hold_kv(self, slots: Ints) -> None:
        """Hold what these slots may still fill: after all plans in flight, and at the peak of each
        of them.
        """
        books = self._books
        rows = books.row_of[slots]
        upper = books.computed_tokens[rows] + books.unsure_tokens[rows]
        top = upper.copy()
        for flight in reversed(self.flights):
            at = _positions(flight.slots, slots, books.capacity)
            runs = at >= 0
            runs[runs] = flight.restarts[at[runs]] == books.restarts[rows[runs]]
            upper[runs] -= (flight.computed + flight.unsure)[at[runs]]
            top[runs] = np.maximum(top[runs], upper[runs] + flight.caps[at[runs]])
        books.kv_held_blocks[rows] = -(-top // books.block_tokens)


# ---------------------------------------------------------------- batches


def _shape(has: Ints, tokens: Ints, decode: Bools) -> BatchShape:
    """Entries that compute `tokens` on the `has` they stand on, drafts to be verified among
    them.
    """
    if decode.all():
        return BatchShape(decodes=len(has), decode_context=int(has.sum())).with_drafts(
            tokens - 1, has
        )
    chunk = ~decode
    l_in, l_has = tokens[chunk].astype(np.int64), has[chunk].astype(np.int64)
    shape = BatchShape(
        int(l_in.sum()),
        len(l_in),
        float((l_in * l_in).sum()),
        float((l_in * l_has).sum()),
        int(l_has.sum()),
        int(np.count_nonzero(decode)),
        int(has[decode].sum()),
    )
    return shape.with_drafts(tokens[decode] - 1, has[decode])


def _within_budget(caps: Ints, drafting: Bools, budget_tokens: int) -> Ints:
    """What is likely to be verified: the caps, shrunk evenly where their sum exceeds the budget
    that they share.
    """
    drafts = int((caps[drafting] - 1).sum())
    room = max(budget_tokens - int(np.count_nonzero(drafting)), 0)
    if drafts <= room:
        return caps
    verified = caps.copy()
    verified[drafting] = 1 + np.rint((caps[drafting] - 1) * (room / drafts)).astype(np.int32)
    return verified


def _selection(speculation: Speculation, depth: Ints) -> Selection:
    return Selection(
        method=speculation.method,
        depth=pack(depth),
        width=pack(speculation.width),
        needed=speculation.needed.astype("<f4").tobytes(),
        budget_tokens=speculation.budget_tokens,
        needed_limit_tokens=speculation.needed_limit_tokens,
    )


def _told(ack: PlanAck, flight: Flight, capacity: int) -> tuple[Ints, Ints, Ints, Ints]:
    """What the ack says of each of the flight's entries: computed, emitted, drafted, cached;
    nothing of those that were skipped.
    """
    nothing = bytes(len(ack.slots))
    columns = [
        unpack(raw)
        for raw in (ack.computed, ack.emitted, ack.drafted or nothing, ack.cached or nothing)
    ]
    if ack.slots != flight.packed_slots:
        at = _positions(unpack(ack.slots), flight.slots, capacity)
        columns = [np.where(at >= 0, np.append(column, np.int32(0))[at], 0) for column in columns]
    computed, emitted, drafted, cached = columns
    return computed, emitted, drafted, cached


def _positions(of: Ints, wanted: Ints, capacity: int) -> Ints:
    """Where each wanted slot stands among `of`; -1 where it does not."""
    at = np.full(capacity, -1, dtype=np.int32)
    at[of] = np.arange(len(of), dtype=np.int32)
    found: Ints = at[wanted]
    return found
