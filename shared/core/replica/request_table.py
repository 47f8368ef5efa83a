"""The request table of one replica: a row per request, a numpy array per column, so that a planning
step costs microseconds. Nothing else writes the columns.

A policy may plan rows [0, live); rows [live, used) are leaving, their end is in flight. A request's
row changes, its slot does not.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from shared.columns import Indices, Ints
from shared.core.prefixes.kept import KeptPrefixes
from shared.core.replica.shared_kv import SharedKv
from shared.core.replica.table_rows import COLUMNS, DECODE, PREFILL, VIEWED, WAITING, TableRows
from shared.perf.draft import Draft
from shared.perf.iteration_time import Profile
from shared.policy.seam import DEFINITIONS, Bools, Floats, View
from shared.schemas import Offer
from shared.vocabulary import ServiceClass, Slo


class RequestTable(TableRows):
    """The rows of every request that a replica holds, as predicted after the plans in flight."""

    def __init__(
        self,
        *,
        slots: int,
        kv_blocks: int,
        block_tokens: int,
        context_tokens: int,
        draft_kv_blocks: int = 0,  # 0: the draft model's KV is not counted
    ) -> None:
        self.capacity = slots
        self.kv_blocks = kv_blocks
        self.draft_kv_blocks = draft_kv_blocks
        self.block_tokens = block_tokens
        self.context_tokens = context_tokens
        self.live = 0
        self.used = 0
        self.kv, self.draft_kv = SharedKv(kv_blocks), SharedKv(draft_kv_blocks)
        self.expects = False  # some row has had `computed_tokens` before it began
        self.row_of: Indices = np.full(slots, -1, dtype=np.intp)
        # when the newest acked token of each slot came; the view's column has tokens in flight, too
        self.acked_token_unix_s: Floats = np.full(slots, np.inf)
        self.offers: dict[int, Offer] = {}  # by slot, as accepted
        self.brought: dict[int, int] = {}  # by slot: positions whose KV came from another replica
        self.applications: list[str] = []
        self._application_index: dict[str, int] = {}
        # one array for each dtype, its columns one below the other: a row is moved and cleared in
        # three steps
        self._blocks: list[np.ndarray] = []
        for dtype in sorted(set(COLUMNS.values()), key=str):
            names = [name for name, kind in COLUMNS.items() if kind is dtype]
            block = np.zeros((len(names), slots), dtype=dtype)
            self._blocks.append(block)
            for name, column in zip(names, block, strict=True):
                setattr(self, name, column)
        self._viewed: list[np.ndarray] = [getattr(self, name) for name in VIEWED]
        self._window = [column[:0] for column in self._viewed]  # the live rows of the last view

    # ------------------------------------------------------------ rows

    def add(
        self,
        slot: int,
        offer: Offer,
        *,
        computed_tokens: int = 0,
        generated_tokens: int | None = None,
        draft_tokens: int = 0,
    ) -> None:
        """A request takes `slot`. With computed > 0 the worker has it already (resync)."""
        assert self.row_of[slot] < 0, f"slot {slot} is taken"
        row = self.used
        self.used += 1
        generated = offer.generated_tokens if generated_tokens is None else generated_tokens
        # A decode has computed all but its newest token; a prefill must compute all its tokens.
        decoding = generated > 0 and computed_tokens == offer.prompt_tokens + generated - 1
        target = computed_tokens if decoding else offer.prompt_tokens + generated
        for block in self._blocks:
            block[:, row] = 0
        self.slot[row] = slot
        self.phase[row] = DECODE if decoding else PREFILL if computed_tokens else WAITING
        self.prompt_tokens[row] = offer.prompt_tokens
        self.target_tokens[row] = target
        self.computed_tokens[row] = computed_tokens
        self.generated_tokens[row] = generated
        self.draft_tokens[row] = draft_tokens
        self.max_tokens[row] = offer.max_tokens
        self.kv_held_blocks[row] = -(-computed_tokens // self.block_tokens)
        if self.draft_kv_blocks:
            self.draft_held_blocks[row] = -(-draft_tokens // self.block_tokens)
        self.application[row] = self._application(offer.application)
        slo = offer.slo
        self.arrived_unix_s[row] = offer.arrived_unix_s
        self.first_token_unix_s[row] = offer.first_token_unix_s
        self.acked_token_unix_s[slot] = offer.newest_token_unix_s
        self.first_due_unix_s[row] = slo.first_due_unix_s(offer.arrived_unix_s)
        self.next_due_unix_s[row] = offer.next_due_unix_s
        self.last_due_unix_s[row] = slo.last_due_unix_s(offer.arrived_unix_s)
        self._pace(row, slo, offer.thinking)
        self.definition[row] = DEFINITIONS.index(slo.definition)
        self.importance[row] = offer.importance
        self.expires_unix_s[row] = offer.expires_unix_s
        self.begin_by_unix_s[row] = offer.begin_by_unix_s
        self.best_effort[row] = offer.service_class is ServiceClass.BEST_EFFORT
        self.offloaded[row] = offer.left == "offloaded"
        self.offers[slot] = offer
        if offer.kv_tokens and not computed_tokens:
            self.brought[slot] = offer.kv_tokens
        self.row_of[slot] = row
        self._swap(row, self.live)
        self.live += 1

    def _pace(self, row: int, slo: Slo, thinking: bool) -> None:
        self.thinking[row] = thinking
        self.tbt_s[row] = slo.pace_s(thinking)
        self.tightest_tbt_s[row] = slo.tightest_pace_s(thinking)

    def answers(self, slot: int, thinking_tokens: int) -> None:
        """The request's thinking ended after `thinking_tokens` output tokens. Tokens already
        counted beyond those were due at the pace of the response.
        """
        row = int(self.row_of[slot])
        if not self.thinking[row]:
            return
        slo = self.offers[slot].slo
        # steps from one token of the response to the next
        steps = int(self.generated_tokens[row]) - max(thinking_tokens, 1) + 1
        if steps > 0:
            self.next_due_unix_s[row] += steps * (slo.pace_s(False) - slo.pace_s(True))
        self._pace(row, slo, False)

    def set_turn(self, slot: int, tenant: int, turn: float) -> None:
        row = self.row_of[slot]
        self.tenant[row], self.turn[row] = tenant, turn

    def set_best_effort(self, slot: int, best_effort: bool) -> None:
        self.best_effort[self.row_of[slot]] = best_effort

    def leaves_unix_s(self) -> Floats:
        """[live] the instant until which each request is served, as it stands now."""
        n = self.live
        waits = self.best_effort[:n] & (self.generated_tokens[:n] == 0)
        until = np.where(waits, self.begin_by_unix_s[:n], np.inf)
        return np.minimum(self.expires_unix_s[:n], until)

    def leave(self, slot: int) -> None:
        """Nothing more is planned for the slot; it stays in the table until its end is acked."""
        row = int(self.row_of[slot])
        if row < self.live:
            self.live -= 1
            self._swap(row, self.live)

    def come_back(self, slot: int) -> None:
        """The predicted end of the slot's request did not happen: it is planned again."""
        row = int(self.row_of[slot])
        if row >= self.live:
            self._swap(row, self.live)
            self.live += 1

    def remove(self, slot: int) -> Offer:
        self.leave(slot)
        self._unshare(int(self.row_of[slot]))
        self.used -= 1
        self._swap(int(self.row_of[slot]), self.used)
        self.row_of[slot] = -1
        self.brought.pop(slot, None)
        return self.offers.pop(slot)

    def holds(self, slot: int) -> bool:
        return 0 <= slot < self.capacity and self.row_of[slot] >= 0

    def plannable(self, rows: Indices) -> Bools:
        """A mask of the live ones among these rows. A slot without a request has row -1, which
        counts as the largest number when read as unsigned.
        """
        live: Bools = rows.view(np.uintp) < self.live
        return live

    def _swap(self, a: int, b: int) -> None:
        if a != b:
            for block in self._blocks:
                moved = block[:, a].copy()
                block[:, a] = block[:, b]
                block[:, b] = moved
        self.row_of[self.slot[a]] = a
        if b < self.used:
            self.row_of[self.slot[b]] = b

    def _application(self, name: str) -> int:
        """The index of an application. A client cannot grow the list beyond 256; further names
        share one.
        """
        index = self._application_index
        if name not in index and len(index) >= 256:
            name = "other"
        if name not in index:
            index[name] = len(index)
            self.applications.append(name)
        return index[name]

    def drop_kv(self, row: int) -> None:
        """Forget the row's KV, the draft model's too."""
        self._unshare(row)
        self.brought.pop(int(self.slot[row]), None)
        self.computed_tokens[row] = self.unsure_tokens[row] = self.kv_held_blocks[row] = 0
        self.draft_tokens[row] = self.draft_held_blocks[row] = 0
        self.load_s[row] = 0.0
        self.restarts[row] += 1

    def restart(self, row: int) -> None:
        """The row loses its KV and keeps its tokens: it must compute all of them again."""
        self.target_tokens[row] = self.prompt_tokens[row] + self.generated_tokens[row]
        self.drop_kv(row)
        self.phase[row] = WAITING

    def expect(self, kept: KeptPrefixes) -> None:
        """Count as computed what the rows that wait will find in the engine's cache, or has come
        there for them. They hold no KV for it yet.
        """
        if not kept and not self.expects and not self.brought:
            return
        waiting = (self.phase[: self.live] == WAITING).nonzero()[0].tolist()
        slots = self.slot[waiting].tolist()
        found = kept.found([(slot, self.offers[slot].prefix) for slot in slots])
        for row, slot, (tokens, load_s) in zip(waiting, slots, found, strict=True):
            if (brought := self.brought.get(slot, 0)) > tokens:
                tokens, load_s = brought, 0.0
            tokens = kept.usable(tokens, int(self.target_tokens[row]))
            self.computed_tokens[row], self.load_s[row] = tokens, load_s
            self.expects |= tokens > 0

    def expected(self, rows: Indices) -> Ints | None:
        """The tokens that these rows will find if they begin now; None: none."""
        if not self.expects:
            return None
        found = np.where(self.phase[rows] == WAITING, self.computed_tokens[rows], 0)
        return found if np.count_nonzero(found) else None

    def begin_loads(self, rows: Indices) -> float:
        """These rows run. Returns the seconds in which what they find in the host's memory comes to
        the GPU.
        """
        load_s = float(self.load_s[rows].sum())
        self.load_s[rows] = 0.0
        return load_s

    # ------------------------------------------------------------ effects of plans

    def advance(self, rows: Indices, computed: Ints, blocks: Ints | int) -> None:
        """These rows compute this many more positions, and take this many more blocks."""
        self.kv_held_blocks[rows] += blocks
        self.computed_tokens[rows] += computed

    def end_chunks(self, rows: Indices, decode: Bools, end_unix_s: float) -> tuple[Bools, Bools]:
        """The chunks of the rows that do not decode are computed: a prefill that begins leaves
        WAITING, one that ends becomes a decode. Returns which rows make a token, and which make
        their first.
        """
        chunks = (~decode).nonzero()[0]
        of_chunks = rows[chunks]
        ends: Bools = self.computed_tokens[of_chunks] >= self.target_tokens[of_chunks]
        self.phase[of_chunks] = np.where(ends, DECODE, PREFILL)
        if not np.count_nonzero(ends):
            return decode, np.zeros(len(rows), dtype=np.bool_)
        ended = chunks[ends]
        emitted = decode.copy()
        emitted[ended] = True
        firsts = emitted & np.isinf(self.first_token_unix_s[rows])
        self.first_token_unix_s[rows[firsts]] = end_unix_s
        # without a TTFT the pace counts from the first token
        ended_rows = rows[ended]
        unpaced = np.isinf(self.next_due_unix_s[ended_rows])
        free = ended_rows[unpaced & (self.generated_tokens[ended_rows] == 0)]
        self.next_due_unix_s[free] = end_unix_s
        return emitted, firsts

    def make_tokens(self, rows: Indices, tokens: Ints | int = 1) -> None:
        """Each of these rows makes this many tokens; a row that makes its last one leaves."""
        self.next_due_unix_s[rows] += tokens * self.tbt_s[rows]  # deadlines are cumulative
        generated = self.generated_tokens[rows] + tokens
        self.generated_tokens[rows] = generated
        for slot in self.slot[rows[generated >= self.max_tokens[rows]]].tolist():
            self.leave(slot)

    def draft(self, rows: Indices, most: Ints, unsure: Ints) -> None:
        """These rows draft: the draft model then has the positions that they have, and one more.
        `most`: as in `draft_blocks_for`. `unsure`: tokens they may make beyond the certain one.
        """
        if self.draft_kv_blocks:
            self.draft_held_blocks[rows] += self.draft_blocks_for(rows, most)
        self.draft_tokens[rows] = self.computed_tokens[rows] + 1
        self.unsure_tokens[rows] += unsure

    def leap_drafting(self, rows: Indices, made: Ints, drafting: Indices, top: Ints) -> None:
        """These rows have run several iterations: [iterations, rows] tokens made. Deadlines add up
        as if each was acked, and then planned once more. `drafting`: those of the rows that draft.
        `top`: positions that the rows may fill.
        """
        tbt_s = self.tbt_s[rows]
        tbt_s = np.where(np.isfinite(tbt_s), tbt_s, 0.0)
        steps = np.empty((1 + 2 * len(made), len(rows)))
        steps[0] = self.next_due_unix_s[rows]
        steps[1::2] = (made - 1) * tbt_s
        steps[2::2] = tbt_s
        self.next_due_unix_s[rows] = np.add.accumulate(steps)[-1]
        tokens = made.sum(axis=0, dtype=np.int32)
        self.generated_tokens[rows] += tokens
        self.computed_tokens[rows] += tokens
        self.draft_tokens[rows[drafting]] = self.computed_tokens[rows[drafting]]
        self.hold_kv(rows, top)

    def date_newest_tokens(self, made: Iterable[tuple[Indices, float]]) -> None:
        """Date the newest token of each live row: at the end of the last plan that makes one, or
        when its newest acked one came. `made`: slots and end of each plan in flight, in order.
        """
        newest_unix_s = self.newest_token_unix_s
        newest_unix_s[: self.live] = self.acked_token_unix_s[self.slot[: self.live]]
        for slots, end_unix_s in made:
            rows = self.row_of[slots]
            newest_unix_s[rows[self.plannable(rows)]] = end_unix_s

    # ------------------------------------------------------------ corrections by acks

    def tokens_came(self, slots: Indices, at_unix_s: float) -> None:
        """A token of each of these slots is acked."""
        self.acked_token_unix_s[slots] = at_unix_s

    def first_tokens_came(self, rows: Indices, emitted: Ints, at_unix_s: float) -> None:
        """The predicted first tokens of these rows came at this instant, or not at all. A pace
        without a TTFT counts from there.
        """
        anchored = np.isinf(self.first_due_unix_s[rows]) & np.isfinite(self.tbt_s[rows])
        instant = np.where(emitted > 0, at_unix_s, math.inf)
        shift = instant - self.first_token_unix_s[rows]
        self.next_due_unix_s[rows[anchored]] += shift[anchored]
        self.first_token_unix_s[rows] = instant

    def verified(self, rows: Indices, unsure: Ints) -> None:
        """This many tokens of these rows are no longer unsure."""
        self.unsure_tokens[rows] -= unsure

    def accept(self, rows: Indices, drafts: Ints) -> None:
        """This many drafts of these rows were accepted. They are in the draft model's KV too, save
        the last one of a chain that was accepted as a whole.
        """
        self.make_tokens(rows, drafts)
        self.computed_tokens[rows] += drafts
        self.draft_tokens[rows] += drafts

    def recount(self, row: int, extra: int, *, leaves: bool) -> None:
        """The request made `extra` tokens more than predicted (below 0: fewer). Unless it leaves,
        its deadlines move, and a prefill has as many more to compute.
        """
        self.generated_tokens[row] += extra
        if leaves:
            return
        if math.isfinite(self.next_due_unix_s[row]):
            self.next_due_unix_s[row] += extra * self.tbt_s[row]
        if self.phase[row] != DECODE:
            self.target_tokens[row] = self.prompt_tokens[row] + self.generated_tokens[row]

    def reach(self, row: int, computed_tokens: int) -> None:
        """The row has this many positions. From that follow its phase, what it has left to compute,
        and whether it is planned; it may be planned again although its end was predicted before.
        """
        known = self.prompt_tokens[row] + self.generated_tokens[row]
        self.computed_tokens[row] = computed_tokens
        if self.generated_tokens[row] > 0 and computed_tokens >= known - 1:
            self.phase[row] = DECODE
        else:
            self.target_tokens[row] = known
            self.phase[row] = PREFILL if computed_tokens else WAITING
        if self.generated_tokens[row] < self.max_tokens[row]:
            self.come_back(int(self.slot[row]))
        else:
            self.leave(int(self.slot[row]))

    def take_back(self, row: int, tokens: int, *, first: bool) -> None:
        """Undo this many tokens that the row was predicted to make: their count, their deadlines,
        and the instant of the first token if that is among them.
        """
        self.generated_tokens[row] -= tokens
        if tokens and math.isfinite(self.tbt_s[row]):
            self.next_due_unix_s[row] -= tokens * self.tbt_s[row]
        elif not self.generated_tokens[row]:
            self.next_due_unix_s[row] = self.first_due_unix_s[row]
        if first:
            self.first_token_unix_s[row] = math.inf
            if math.isinf(self.first_due_unix_s[row]):
                self.next_due_unix_s[row] = math.inf  # it counted from that token

    def make_token(self, row: int, at_unix_s: float) -> bool:
        """The row makes a token at this instant. True if it is the first."""
        first = math.isinf(self.first_token_unix_s[row])
        if first:
            self.first_token_unix_s[row] = at_unix_s
        if math.isinf(self.next_due_unix_s[row]) and not self.generated_tokens[row]:
            self.next_due_unix_s[row] = at_unix_s
        self.generated_tokens[row] += 1
        self.next_due_unix_s[row] += self.tbt_s[row]
        return first

    def hold_kv(self, rows: Indices, top: Ints, draft_top: Ints | None = None) -> None:
        """These rows hold the blocks of `top` positions, and of `draft_top` in the draft's KV."""
        self.kv_held_blocks[rows] = -(-top // self.block_tokens)
        if draft_top is not None:
            self.draft_held_blocks[rows] = -(-draft_top // self.block_tokens)

    def share(self, blocks: int, draft_blocks: int) -> None:
        """The worker saves this many blocks, and this many of the draft model's, by requests that
        share some; blocks that plans in flight drop are already left out.
        """
        self.kv.share(blocks, self._sum(self.kv_held_blocks))
        self.draft_kv.share(draft_blocks, self._sum(self.draft_held_blocks))

    def _unshare(self, row: int) -> None:
        """The row loses its KV, the draft model's too: fewer blocks may be shared."""
        self.kv.unshare(int(self.kv_held_blocks[row]))
        self.draft_kv.unshare(int(self.draft_held_blocks[row]))

    # ------------------------------------------------------------ sums

    def _sum(self, held_blocks: Ints) -> int:
        return int(held_blocks[: self.used].sum())

    def kv_free_blocks(self) -> int:
        return self.kv.free(self._sum(self.kv_held_blocks))

    def blocks_for(self, rows: Indices, caps: Ints) -> Ints:
        """Blocks that entries with these caps newly take, at their upper bound."""
        return self._blocks_beyond(self.kv_held_blocks, rows, caps)

    def draft_free_blocks(self) -> int:
        return self.draft_kv.free(self._sum(self.draft_held_blocks))

    def draft_blocks_for(self, rows: Indices, most: Ints) -> Ints:
        """The same for the draft model's KV. `most`: the positions by `draft_room`."""
        return self._blocks_beyond(self.draft_held_blocks, rows, most)

    def _blocks_beyond(self, held_blocks: Ints, rows: Indices, tokens: Ints) -> Ints:
        top = self.computed_tokens[rows] + self.unsure_tokens[rows] + tokens
        newly: Ints = np.maximum(-(-top // self.block_tokens) - held_blocks[rows], 0)
        return newly

    def view(
        self,
        start_unix_s: float,
        profile: Profile,
        draft: Draft | None = None,
        pool: str = "",
        accepted_shares: Sequence[float] = (),
        longest_chain: int = 0,
    ) -> View:
        """A window on the live rows; no copies. It is valid until the table changes."""
        if len(self._window[0]) != self.live:
            self._window = [column[: self.live] for column in self._viewed]
        return View(
            *self._window,
            start_unix_s=start_unix_s,
            profile=profile,
            kv_blocks=self.kv_blocks,
            kv_free_blocks=self.kv_free_blocks(),
            block_tokens=self.block_tokens,
            context_tokens=self.context_tokens,
            applications=self.applications,
            draft=draft,
            pool=pool,
            accepted_shares=accepted_shares,
            longest_chain=longest_chain,
        )

    def check(self) -> None:
        """Raises AssertionError unless the table balances."""
        assert 0 <= self.live <= self.used <= self.capacity
        n = self.used
        slots = self.slot[:n].tolist()
        assert len(set(slots)) == n, "a slot twice"
        assert set(slots) == set(self.offers), "rows and offers differ"
        assert all(self.row_of[s] == r for r, s in enumerate(slots)), "row_of is wrong"
        assert self.kv_free_blocks() >= 0, "KV promised beyond capacity"
        assert not self.draft_kv_blocks or self.draft_free_blocks() >= 0, "draft KV beyond capacity"
        has = np.where(self.phase[:n] == WAITING, 0, self.computed_tokens[:n])
        top = -(-(has + self.unsure_tokens[:n]) // self.block_tokens)
        assert (self.kv_held_blocks[:n] >= top).all(), "KV held below what is computed"
        assert (self.computed_tokens[: self.live] >= 0).all()
        assert (self.unsure_tokens[:n] >= 0).all()
