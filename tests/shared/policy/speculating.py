"""A policy that speculates, for tests: `fcfs`, whose decodes all draft alike, whatever the load and
the KV.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shared.policy import registry
from shared.policy.seam import Choice, Drafts, Observation, Phase, Policy, Speculation, View


class Speculating:
    """The policy. `method` chain: `depth` drafts in line. Another method: trees, of which each
    entry verifies `cap` tokens at most, within a budget for all.
    """

    def __init__(
        self,
        method: str = "chain",
        depth: int = 3,
        width: int = 1,
        cap: int = 0,
        budget_tokens: int = 1 << 20,
        repeats: int = 1,
    ) -> None:
        inner: Policy = registry.make("fcfs", {"chunk_tokens": "512"})
        self.name, self.declared = "speculating", inner.declared
        self.admit, self._inner = inner.admit, inner
        self._method, self._depth, self._width, self._cap, self._budget = (
            method,
            depth,
            width,
            cap or depth + 1,
            budget_tokens,
        )
        self._repeats = repeats
        self.drafts = list[Drafts]()

    def plan(self, view: View) -> Sequence[Choice]:
        [choice] = self._inner.plan(view)
        row_of = {slot: row for row, slot in enumerate(view.slot.tolist())}
        decodes = np.array(
            [view.phase[row_of[slot]] == Phase.DECODE for slot in choice.slots.tolist()],
            dtype=np.bool_,
        )
        if not decodes.any() or view.draft is None:
            return [choice]
        depth = np.where(decodes, self._depth, 0).astype(np.int32)
        speculation = Speculation(
            method=self._method,
            depth=depth,
            width=np.where(decodes, self._width, 1).astype(np.int32),
            budget_tokens=self._budget,
            needed_limit_tokens=self._cap,
            lasts_s=0.05,
        )
        caps = np.where(decodes, self._cap, choice.caps).astype(np.int32)
        repeats = self._repeats if decodes.all() else min(self._repeats, choice.repeats)
        return [replace(choice, caps=caps, speculation=speculation, repeats=repeats)]

    def observe(self, seen: Observation) -> None:
        if seen.drafts is not None:
            self.drafts.append(seen.drafts)


CHAIN = {"method": "chain", "depth": 3}
TREE = {"method": "slo_then_throughput", "depth": 3, "width": 2, "cap": 6, "budget_tokens": 60}
