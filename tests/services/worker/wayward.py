"""A sim engine with two habits of vLLM: it finds prefixes that are computed already, and now and
then does nothing for an entry.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from services.worker.engine import Done, Outcome
from services.worker.engines.sim.engine import SimEngine
from shared.core.worker.step import Work
from shared.policy.speculation import along
from shared.schemas import Selection


class WaywardEngine(SimEngine):
    """`hits`: how often a request that begins finds a part computed; `lapses`: how often an entry
    is left out. Books never overflow.
    """

    def __init__(self, *args: Any, rng: Random, hits: float, lapses: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rng, self._hits, self._lapses = rng, hits, lapses
        self.found = self.lapsed = 0

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        free, kept, cached = self._free_blocks, list[int](), dict[int, int]()
        for n, entry in enumerate(work):
            blocks = self._growth(entry.slot, entry.tokens)
            if blocks > free or self._rng.random() < self._lapses:
                self.lapsed += 1
                continue
            free -= blocks
            kept.append(n)
        runs = [work[n] for n in kept]
        if selection is not None:
            selection = along(selection, kept) if kept else None
        for n, entry in enumerate(runs):
            state = self._slots[entry.slot]
            left, hit = state.known - state.computed, 0
            if not state.computed and self._rng.random() < self._hits:
                size = self.facts.block_tokens
                hit = size * self._rng.randint(0, (left - 1) // size)
            more = self._growth(entry.slot, min(left, hit + entry.tokens)) - self._growth(
                entry.slot, entry.tokens
            )
            if not hit or more > free:
                continue
            free -= more
            self.found += hit
            state.computed = cached[entry.slot] = hit
            tokens = min(entry.tokens, left - hit)
            runs[n] = Work(entry.slot, tokens, tokens == left - hit)
        ran = super().execute(runs, selection)
        did = dict(zip((entry.slot for entry in runs), ran.done, strict=True))
        for slot, hit in cached.items():
            did[slot] = did[slot]._replace(computed=did[slot].computed + hit, cached=hit)
        return ran._replace(done=[did.get(entry.slot, Done(0, ())) for entry in work])

    def _growth(self, slot: int, tokens: int) -> int:
        state = self._slots[slot]
        return max(0, -(-(state.computed + tokens) // self.facts.block_tokens) - state.blocks)
