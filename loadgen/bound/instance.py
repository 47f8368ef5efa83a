"""Puts the load whose bound is sought into numbers: work, the time for it, and its charges."""

from collections.abc import Sequence

import numpy as np

from loadgen.bound.charges import Charges, charges, iteration_range_s
from loadgen.bound.common import Common
from loadgen.bound.prices import Market, Wares
from loadgen.bound.shares import Floats, payers
from loadgen.bound.strata import strata
from loadgen.bound.windows import Windows
from loadgen.bound.work import work_of
from loadgen.load.mix import PlannedRequest
from shared.perf.iteration_time import Profile
from shared.rules.tiers import TierSet

BLOCK_TOKENS = 16  # of KV: a part of a block at the end of a replica's memory holds nothing
LENGTHS_TOKENS = 1024  # tables of charges are made for multiples of it
RUSH_CELLS, LATE_CELLS = 768, 192  # at most
CELLS_PER_REQUEST = 2


class Instance:
    """The requests on the replicas of a profile. `rush` is the time until the last deadline of the
    requests that may have to pay for iterations (shares.py), `late` the time after it.
    """

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        tiers: TierSet,
        profile: Profile,
        kv_tokens: int,
        replicas: int,
        of_others: Common | None = None,
    ) -> None:
        self._strata = strata(profile)
        self._kv_tokens = kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        count = len(requests)
        nothing = Common(np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64))
        self._common = nothing if of_others is None else of_others
        self._cached = self._common.some
        longest = max(r.prompt_tokens + r.output_tokens for r in requests)
        self._longest = -(-longest // LENGTHS_TOKENS) * LENGTHS_TOKENS
        self.iteration_range_s = iteration_range_s(self._strata)
        everything = work_of(
            requests, tiers, profile, self._kv_tokens, self._least_prompt_s(), self._common.earlier
        )
        bounded = np.isfinite(everything.due_s) | np.isfinite(everything.prompt_due_s)
        # a scheduler that waits long enough satisfies these
        self.unbounded = int((~bounded & ~everything.hopeless).sum())
        self.work = everything.only(bounded & ~everything.hopeless)
        self._common = self._common.only(bounded & ~everything.hopeless)
        self.payers = payers(self.work)
        if len(self.work.steps):
            self._cut(replicas)

    def _charges(self, iteration_s: float) -> Charges:
        return charges(self._strata, iteration_s, self._longest, cached=self._cached)

    def _least_prompt_s(self) -> Floats:
        """[tokens] the least time of the iterations that compute a prompt of that length. Where no
        request is credited anything, a charge is a part of its own iterations' time.
        """
        least = self._charges(self.iteration_range_s[0])
        return np.zeros(self._longest + 1) if least.credit_s.any() else least.prompt_s

    def _cut(self, replicas: int) -> None:
        """Cut time into cells, and every window into runs of cells, rush and late."""
        work = self.work
        dues_s = np.concatenate((work.due_s, work.prompt_due_s))
        begin_s, end_s = float(work.arrival_s.min()), float(dues_s[np.isfinite(dues_s)].max())
        turn_s = float(work.due_s[self.payers.of].max(initial=begin_s))
        rush, late = (
            min(most, 8 + CELLS_PER_REQUEST * len(work.steps)) for most in (RUSH_CELLS, LATE_CELLS)
        )
        runs = [(begin_s, turn_s, rush), (turn_s, end_s, late)]
        edges = [
            np.linspace(since_s, until_s, cells + 1)
            for since_s, until_s, cells in runs
            if until_s > since_s
        ]
        edges_s = np.concatenate([run[1:] if i else run for i, run in enumerate(edges)])
        cells = len(edges_s) - 1
        rush = rush if turn_s > begin_s else 0
        self.middles_s = (edges_s[1:] + edges_s[:-1]) / 2
        self.capacity_s = np.diff(edges_s) * replicas
        # A deadline on an edge may be met in the cell after it, by rounding; both ends are
        # inclusive.
        bounds = [
            np.clip(np.searchsorted(edges_s, at_s, side="right") - 1, 0, cells - 1)
            for at_s in (work.arrival_s, work.prompt_due_s, work.steps_from_s, work.due_s)
        ]
        arrived, prompt_due, steps_from, due = bounds
        self._prompts, self._steps = (
            Windows(arrived, prompt_due, cells),
            Windows(steps_from, due, cells),
        )
        self._rush_steps = Windows(steps_from, np.minimum(due, rush - 1), cells)
        self._late_steps = Windows(np.maximum(steps_from, rush), due, cells)
        self._contexts = Windows(
            work.prompt_tokens, work.prompt_tokens + work.steps - 1, self._longest + 1
        )

    def market(self, iteration_s: float, shared: Floats | None) -> Market:
        """The market in which every iteration collects `iteration_s`: from the contexts that it
        reads or, while the pace matters, by `shared`.

        `shared` has for each request the sum of its steps' shares; None: the pace never matters.
        """
        work, of = self.work, self._charges(iteration_s)
        upto, before = work.prompt_tokens + work.steps - 1, work.prompt_tokens - 1
        steps_s, credit_s = (
            of.decodes_s[upto] - of.decodes_s[before],
            of.credit_s[upto] - of.credit_s[before],
        )
        # what another request may have computed is charged to the first to come
        prompt_s = of.prompt_s[work.prompt_tokens] - of.prompt_s[self._common.earlier]
        prompts = Wares(self._prompts, np.maximum(prompt_s, 0.0))
        own = np.maximum(work.prompt_tokens - self._common.anywhere, 0)  # of the KV at least
        if shared is None:
            contexts = work.steps * (2 * own - 1 + work.steps) / 2
            steps = (Wares(self._steps, steps_s + iteration_s * contexts / self._kv_tokens),)
            return Market(self.capacity_s, prompts, steps, credit_s)
        # The least factor, over the steps of a request, by which its context's part of an iteration
        # makes a late step dearer.
        each_s = np.diff(of.decodes_s, prepend=0.0)
        dearer = iteration_s * np.arange(len(each_s)) / self._kv_tokens / np.maximum(each_s, 1e-12)
        counts = (work.steps > 0) & (own == work.prompt_tokens)
        late_s = steps_s * (1.0 + np.where(counts, self._contexts.least(dearer), 0.0))
        return Market(
            self.capacity_s,
            prompts,
            (
                Wares(self._rush_steps, steps_s + iteration_s * shared),
                Wares(self._late_steps, late_s),
            ),
            credit_s,
        )
