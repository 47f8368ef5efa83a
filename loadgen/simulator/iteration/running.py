"""The iteration that a simulated worker has under way: its plan, and what each entry will do."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.simulator.iteration.drafting import Drafting
from shared.columns import Indices, Ints, pack
from shared.perf.shape import BatchShape
from shared.policy.speculation import along, without_drafts
from shared.schemas import BatchPlan, Selection


class Found(NamedTuple):
    """An iteration in which requests begin that have a prefix. Columns run along the entries of its
    ack. `runs`: those with room for what they found and compute; others compute nothing.
    """

    slots: Indices
    runs: NDArray[np.bool_]
    cached: Ints  # positions found in the cache
    loaded_s: float = 0.0  # for those of them that came back from the host's memory

    def of(self, selection: Selection | None) -> Selection | None:
        """The selection for the entries that run. What begins was planned as a prefill, and does
        not draft even if all but one token is found.
        """
        if selection is None:
            return None
        found, runs = np.flatnonzero(self.cached), np.flatnonzero(self.runs)
        return along(without_drafts(selection, found.tolist()), runs.tolist())

    def columns(
        self, tokens: Ints, emitted: Ints, drafted: Ints | None
    ) -> tuple[Indices, Ints, Ints, Ints | None, bytes]:
        """The ack's slots, and these columns of the entries that run along them: what was computed
        with what was found, and packed what was found.
        """

        def spread(column: Ints) -> Ints:
            whole = np.zeros(len(self.runs), dtype=np.int32)
            whole[self.runs] = column
            return whole

        return (
            self.slots,
            spread(tokens) + self.cached,
            spread(emitted),
            None if drafted is None else spread(drafted),
            pack(self.cached) if self.cached.any() else b"",
        )


class Running(NamedTuple):
    """The iteration. Columns run along its entries. `alike`: no prefill and no request ends in it
    and none drafts, so another iteration just like it may follow.
    """

    plan: BatchPlan
    slots: Indices
    fills: Ints  # KV positions while it runs, rejected drafts included
    tokens: Ints  # the positions of these that are kept
    emits: NDArray[np.bool_]
    drafting: Drafting | None  # None: the plan does not speculate
    skipped: bytes
    shape: BatchShape
    ending: Sequence[tuple[int, str]]
    alike: bool
    found: Found | None = None  # None: every entry runs, and found nothing

    @staticmethod
    def drafting_now(
        plan: BatchPlan,
        slots: Indices,
        drafting: Drafting,
        skipped: bytes = b"",
        ending: Sequence[tuple[int, str]] = (),
        found: Found | None = None,
    ) -> "Running":
        """The iteration of a plan in which requests draft, with their drafts in it."""
        did, shape = drafting.did, drafting.shape
        return Running(
            plan,
            slots,
            did.fills,
            did.kept,
            drafting.emits,
            drafting,
            skipped,
            shape,
            ending,
            alike=False,
            found=found,
        )

    def shape_after(self, n: int) -> BatchShape:
        """The shape of the n-th alike iteration after this one."""
        prefill_tokens, prefills, sq, cross, has, decodes, context, drafts = self.shape
        return BatchShape(
            prefill_tokens,
            prefills,
            sq,
            cross + n * sq,
            has + n * prefill_tokens,
            decodes,
            context + n * decodes,
            drafts,
        )
