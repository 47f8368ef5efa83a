"""The books of one replica: a row per request, a numpy array per column, so that a planning step
costs microseconds.

A policy may plan rows [0, live); rows [live, used) are leaving, their end is in flight. A request's
row changes, its slot does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import get_type_hints

import numpy as np

from shared.columns import Indices, Ints
from shared.perf.draft import Draft
from shared.perf.iteration_time import Profile
from shared.policy.seam import DEFINITIONS, Bools, Floats, Phase, Rows, View
from shared.schemas import Offer
from shared.vocabulary import ServiceClass, Slo

# numpy takes an IntEnum five times as slowly
WAITING, PREFILL, DECODE = int(Phase.WAITING), int(Phase.PREFILL), int(Phase.DECODE)


@dataclass(slots=True, eq=False)
class BookRows(Rows):
    """The columns that policies see, and others for the core alone."""

    # how often its KV was dropped: a plan from before does not count for the KV of now
    restarts: Ints
    # of the draft model's KV, at the upper bound; 0 where that has no capacity of its own
    draft_held_blocks: Ints
    expires_unix_s: Floats
    begin_by_unix_s: Floats  # the same for a best-effort request that has no token
    # of shared/core/replica/fairness.py: a number for its tenant, and its turn
    tenant: Ints
    turn: Floats


# by the annotation; what an annotation is made of differs between versions of numpy
_DTYPES: dict[object, type[np.generic]] = {
    Ints: np.int32,
    Indices: np.intp,
    Floats: np.float64,
    Bools: np.bool_,
}


def _columns(rows: type[Rows]) -> dict[str, type[np.generic]]:
    """Name and dtype of each declared column."""
    return {name: _DTYPES[kind] for name, kind in get_type_hints(rows).items()}


COLUMNS = _columns(BookRows)
VIEWED = tuple(field.name for field in fields(Rows))  # in the order that View takes them


class SharedKv:
    """The KV of one model, of which requests share some blocks. Rows hold each block as if it were
    their own; `held` is their sum.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        # Of what rows hold, what the worker saves because requests share it, at the least: as it
        # last said, less all that was dropped or ended since.
        self.shared = 0
        # blocks found in a prefix cache may be promised to a plan in flight already: the engine
        # then does less of that plan
        self.overdrawn = False

    def share(self, blocks: int, held: int) -> None:
        """The worker saves so many blocks, less those that plans in flight drop."""
        self.shared = min(max(blocks, 0), held)
        self.overdrawn = self.overdrawn or held - self.shared > self._blocks

    def unshare(self, blocks: int) -> None:
        """A row loses these blocks. Others may have all of them: then none gets free."""
        self.shared = max(0, self.shared - blocks)

    def free(self, held: int) -> int:
        """The blocks that may still be promised."""
        free = self._blocks - held + self.shared
        if free < 0 and self.overdrawn:
            return 0
        self.overdrawn = False
        return free


class Books(BookRows):
    """The rows of every request that a replica holds, as predicted after the plans in flight."""

    def __init__(
        self,
        *,
        slots: int,
        kv_blocks: int,
        block_tokens: int,
        context_tokens: int,
        draft_kv_blocks: int = 0,  # 0: the draft model's KV needs no books
    ) -> None:
        self.capacity = slots
        self.kv_blocks = kv_blocks
        self.draft_kv_blocks = draft_kv_blocks
        self.block_tokens = block_tokens
        self.context_tokens = context_tokens
        self.live = 0
        self.used = 0
        self.kv, self.draft_kv = SharedKv(kv_blocks), SharedKv(draft_kv_blocks)
        self.row_of: Indices = np.full(slots, -1, dtype=np.intp)
        # when the newest acked token of each slot came; the column of the view has those in flight
        self.acked_token_unix_s: Floats = np.full(slots, np.inf)
        self.offers: dict[int, Offer] = {}  # by slot, as accepted
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
        self.row_of[slot] = row
        self._swap(row, self.live)
        self.live += 1

    def _pace(self, row: int, slo: Slo, thinking: bool) -> None:
        self.thinking[row] = thinking
        self.tbt_s[row], self.tightest_tbt_s[row] = (
            slo.pace_s(thinking),
            slo.tightest_pace_s(thinking),
        )

    def answers(self, slot: int, thinking_tokens: int) -> None:
        """Its thinking ended after so many output tokens. Tokens counted here beyond those were due
        at the pace of the response.
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

    def leaves_unix_s(self) -> Floats:
        """[live] until when each request is served, as things are."""
        n = self.live
        waits = self.best_effort[:n] & (self.generated_tokens[:n] == 0)
        until = np.where(waits, self.begin_by_unix_s[:n], np.inf)
        return np.minimum(self.expires_unix_s[:n], until)

    def leave(self, slot: int) -> None:
        """Nothing more is planned for the slot; it stays in the books until its end is acked."""
        row = int(self.row_of[slot])
        if row < self.live:
            self.live -= 1
            self._swap(row, self.live)

    def come_back(self, slot: int) -> None:
        """The end that was predicted did not happen."""
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
        return self.offers.pop(slot)

    def holds(self, slot: int) -> bool:
        return 0 <= slot < self.capacity and self.row_of[slot] >= 0

    def plannable(self, rows: Indices) -> Bools:
        """A mask of those of these rows that are live. A slot without a request has row -1, which
        is the largest number where none has a sign.
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
        index = self._application_index.get(name)
        if index is None:
            if len(self.applications) >= 256:
                name = "other"
                if name in self._application_index:
                    return self._application_index[name]
            index = len(self.applications)
            self.applications.append(name)
            self._application_index[name] = index
        return index

    def drop_kv(self, row: int) -> None:
        """Forget its KV, the draft model's too."""
        self._unshare(row)
        self.computed_tokens[row] = self.unsure_tokens[row] = self.kv_held_blocks[row] = 0
        self.draft_tokens[row] = self.draft_held_blocks[row] = 0
        self.restarts[row] += 1

    def share(self, blocks: int, draft_blocks: int) -> None:
        """The worker saves so many blocks, and so many of the draft model's, less those that plans
        in flight drop.
        """
        self.kv.share(blocks, self._held_blocks())
        self.draft_kv.share(draft_blocks, self._draft_held_blocks())

    def _unshare(self, row: int) -> None:
        """Its KV goes, the draft model's too."""
        self.kv.unshare(int(self.kv_held_blocks[row]))
        self.draft_kv.unshare(int(self.draft_held_blocks[row]))

    # ------------------------------------------------------------ sums

    def _held_blocks(self) -> int:
        return int(self.kv_held_blocks[: self.used].sum())

    def _draft_held_blocks(self) -> int:
        return int(self.draft_held_blocks[: self.used].sum())

    def kv_free_blocks(self) -> int:
        return self.kv.free(self._held_blocks())

    def blocks_for(self, rows: Indices, caps: Ints) -> Ints:
        """Blocks that entries with these caps newly take, at their upper bound."""
        top = self.computed_tokens[rows] + self.unsure_tokens[rows] + caps
        needed: Ints = np.maximum(-(-top // self.block_tokens) - self.kv_held_blocks[rows], 0)
        return needed

    def draft_free_blocks(self) -> int:
        return self.draft_kv.free(self._draft_held_blocks())

    def draft_blocks_for(self, rows: Indices, most: Ints) -> Ints:
        """Blocks of the draft model's KV that drafting for these rows newly takes, at its upper
        bound. `most`: as `draft_room` has it.
        """
        top = self.computed_tokens[rows] + self.unsure_tokens[rows] + most
        newly: Ints = np.maximum(-(-top // self.block_tokens) - self.draft_held_blocks[rows], 0)
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
        """A window on the live rows; no copies. It is valid until the books change."""
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
        """Raises AssertionError unless the books balance."""
        assert 0 <= self.live <= self.used <= self.capacity
        n = self.used
        slots = self.slot[:n].tolist()
        assert len(set(slots)) == n, "a slot twice"
        assert set(slots) == set(self.offers), "rows and offers differ"
        assert all(self.row_of[s] == r for r, s in enumerate(slots)), "row_of is wrong"
        assert self.kv_free_blocks() >= 0, "KV promised beyond capacity"
        assert not self.draft_kv_blocks or self.draft_free_blocks() >= 0, (
            "draft KV promised beyond capacity"
        )
        top = -(-(self.computed_tokens[:n] + self.unsure_tokens[:n]) // self.block_tokens)
        assert (self.kv_held_blocks[:n] >= top).all(), "KV held below what is computed"
        assert (self.computed_tokens[: self.live] >= 0).all() and (
            self.unsure_tokens[:n] >= 0
        ).all()
