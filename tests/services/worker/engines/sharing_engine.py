"""A simulated engine with a prefix cache, for tests: prompts that begin alike share KV blocks, by
the torch engine's own code. A draft model's KV is shared too, if it has a capacity.
"""

from collections.abc import Sequence
from typing import Any

from services.worker.engine import Done, EngineState, Outcome
from services.worker.engines.sim.engine import SimEngine, _Slot
from services.worker.engines.torch.paged import Blocks, Place
from services.worker.engines.torch.prefixes import Prefix
from shared.columns import unpack_list
from shared.core.worker.step import Load, Work
from shared.policy.acceptance import Speculated
from shared.policy.speculation import along
from shared.schemas import Selection
from shared.vocabulary import Slot


class SharingEngine(SimEngine):
    """An entry that finds no free block does nothing. `idle`: blocks that nobody holds may be taken
    over. Drafts without room raise an error. A prompt that the draft model finds costs it nothing.
    """

    def __init__(self, *args: Any, idle: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._pool = Blocks(self.facts.kv_blocks, self.facts.block_tokens)
        self._kv: dict[Slot, tuple[Place, Prefix, list[int]]] = {}
        self._draft_pool = Blocks(self.facts.draft_kv_blocks, self.facts.block_tokens)
        self._draft_kv: dict[Slot, tuple[Place, Prefix]] = {}
        self.lapsed = 0
        self._drafted_s = 0.0  # of the newest iteration

    def load(self, load: Load) -> None:
        super().load(load)
        self._begin(load.slot, list(load.tokens))

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        kept, runs, cached = list[int](), list[Work](), dict[Slot, int]()
        for n, entry in enumerate(work):
            state, (place, prefix, tokens) = self._slots[entry.slot], self._kv[entry.slot]
            if not place.blocks:
                found = prefix.begin(self._pool, place, tokens, self._spare(work[n:]))
                if found:
                    state.computed = cached[entry.slot] = found
            left = state.known - state.computed
            run = entry._replace(tokens=min(entry.tokens, left) if left > 1 else entry.tokens)
            run = run._replace(emits=run.tokens >= left)
            if self._more(entry.slot, run.tokens) > self._pool.free:
                self.lapsed += 1
                continue
            assert self._pool.grow(place, state.computed + run.tokens)
            kept.append(n)
            runs.append(run)
        if selection is not None:
            selection = along(selection, kept) if kept else None
        self._drafted_s = 0.0
        ran = super().execute(runs, selection)
        did = dict(zip((run.slot for run in runs), ran.done, strict=True))
        for slot, one in did.items():
            place, prefix, tokens = self._kv[slot]
            tokens += one.tokens
            self._pool.shrink(place, self._slots[slot].computed)
            prefix.name(self._pool, place, tokens, self._slots[slot].computed)
            place, prefix = self._draft_kv[slot]
            if place.blocks:
                self._draft_pool.shrink(place, self._slots[slot].drafted)
                prefix.name(self._draft_pool, place, tokens, self._slots[slot].drafted)
        for slot, found in cached.items():
            one = did.get(slot, Done(0, ()))
            did[slot] = one._replace(computed=one.computed + found, cached=found)
        self._pool.check(place for place, _, _ in self._kv.values())
        self._draft_pool.check(place for place, _ in self._draft_kv.values())
        done = [did.get(entry.slot, Done(0, ())) for entry in work]
        return ran._replace(done=done, drafted_s=self._drafted_s)

    def preempt(self, slot: Slot) -> None:
        super().preempt(slot)
        place, _, tokens = self._kv[slot]
        self._pool.release(place)
        self._draft_pool.release(self._draft_kv[slot][0])
        self._begin(slot, tokens)

    def release(self, slot: Slot) -> None:
        super().release(slot)
        self._pool.release(self._kv.pop(slot)[0])
        self._draft_pool.release(self._draft_kv.pop(slot)[0])

    def snapshot(self) -> EngineState:
        return EngineState(
            self._pool.free, list(self._slots), self._pool.shared, self._draft_pool.shared
        )

    def _begin(self, slot: Slot, tokens: list[int]) -> None:
        size = self.facts.block_tokens
        self._kv[slot] = Place(size, len(tokens)), Prefix(size), tokens
        self._draft_kv[slot] = Place(size, len(tokens)), Prefix(size)

    def _speculate(self, work: Sequence[Work], selection: Selection) -> Speculated:
        if self.facts.draft_kv_blocks:
            self._make_draft_room(work, selection)
        did = super()._speculate(work, selection)
        self._drafted_s = did.drafted_s
        return did

    def _check_draft_kv(self, work: Sequence[Work], selection: Selection) -> None:
        """Blocks are counted in the pool."""

    def _make_draft_room(self, work: Sequence[Work], selection: Selection) -> None:
        columns = unpack_list(selection.depth), unpack_list(selection.width)
        for entry, depth, width in zip(work, *columns, strict=True):
            state, (place, prefix) = self._slots[entry.slot], self._draft_kv[entry.slot]
            if not depth or not state.decoding or state.known != state.computed + 1:
                continue
            if not place.blocks:
                tokens, pool = self._kv[entry.slot][2], self._draft_pool
                spare = pool.free if self._idle else 0
                state.drafted = prefix.begin(pool, place, tokens, spare)
            most = state.known + max((depth - 1) * width, depth)  # as draft_room has it
            assert self._draft_pool.grow(place, most), "more draft KV promised than there is"

    def _reserve(self, state: _Slot, tokens: int) -> None:
        """Blocks are counted in the pool."""

    def _more(self, slot: Slot, tokens: int) -> int:
        wanted = self._slots[slot].computed + tokens
        held = len(self._kv[slot][0].blocks)
        return max(0, -(-wanted // self.facts.block_tokens) - held)

    def _spare(self, work: Sequence[Work]) -> int:
        """Free blocks beyond those that these entries ask for."""
        if not self._idle:
            return 0
        asked = sum(self._more(entry.slot, entry.tokens) for entry in work)
        return max(0, self._pool.free - asked)
