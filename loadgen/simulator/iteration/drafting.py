"""Runs a plan in which requests draft, for a virtual worker: once, or over and over in a leap.

How far each request gets is known only when its drafts are verified, so the iterations of a leap
are computed one by one. But nothing is planned, packed or acked between them, and the columns of
worker and planner are written once, at its end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from loadgen.simulator.misjudged import BatchTime
from shared.columns import Ints
from shared.core.replica.events import DraftedIteration
from shared.core.replica.in_flight import shape_of
from shared.perf.draft import Draft
from shared.policy.acceptance import Trees, drafting_depth, speculate
from shared.policy.need import Needs, Paces, calm_until_unix_s, needed_tokens
from shared.policy.seam import Bools
from shared.schemas import Selection


@dataclass(slots=True)
class Requests:
    """The requests of a plan. Columns run along its entries."""

    has: Ints  # KV positions
    left: Ints  # positions to compute before the next token
    output_left: Ints  # output tokens until the end
    filled: Ints  # positions in the draft's KV
    decodes: Bools
    paces: Paces


class Drafting:
    def __init__(
        self,
        draft: Draft,
        batch_s: BatchTime,
        trees: Trees,
        selection: Selection,
        caps: Ints,
        requests: Requests,
        longest_chain: int,
    ) -> None:
        self._draft, self._batch_s, self._trees = draft, batch_s, trees
        self._selection, self._caps, self._longest_chain = selection, caps, longest_chain
        self._requests = requests
        made = requests.paces.generated_tokens
        self._depth = drafting_depth(selection, requests.left, made)
        self._drafts: Bools = self._depth > 0
        self._no_needs: Needs = np.zeros(len(caps), dtype=np.float32)
        self._calm_until_unix_s = -math.inf  # nobody has a need before
        self.ran: list[DraftedIteration] = []  # since the columns of the worker were written

    def begin(self, now_unix_s: float) -> float:
        """Begin an iteration. Returns its seconds. No output is drafted past its end."""
        requests = self._requests
        left, needed = requests.left, self._no_needs
        if now_unix_s >= self._calm_until_unix_s:
            needed = needed_tokens(requests.paces, now_unix_s, self._selection.lasts_s)
        most: Ints = np.minimum(self._caps, np.where(self._drafts, requests.output_left, left))
        self.did = speculate(
            self._draft,
            self._trees,
            self._selection,
            most,
            needed=needed,
            depth=self._depth,
            made=requests.paces.generated_tokens,
            has=requests.has,
            filled=requests.filled,
            longest_chain=self._longest_chain,
        )
        requests.filled, self.emits = self.did.filled, most >= left
        self.shape = shape_of(requests.has, self.did.fills, requests.decodes)
        return self.did.drafted_s + self._batch_s(self.shape)

    def again(self, now_unix_s: float, exec_s: float, spare: Callable[[], Ints]) -> float | None:
        """The iteration under way ends, having computed for `exec_s`, and another like it begins.
        Returns the next one's seconds; None if none may follow. `spare`: the tokens that each entry
        may make before none may.
        """
        if not self.ran:
            self._spare = spare()
        did, requests = self.did, self._requests
        if np.count_nonzero(did.kept > self._spare):
            return None
        self.ran.append(
            DraftedIteration(now_unix_s, exec_s, did.drafted_s, self.shape, did.drafted, did.kept)
        )
        self._spare = self._spare - did.kept
        requests.has = requests.has + did.kept
        requests.output_left = requests.output_left - did.kept
        made = requests.paces.generated_tokens + did.kept
        requests.paces = requests.paces._replace(generated_tokens=made)
        if len(self.ran) == 1:
            self._calm_until_unix_s = calm_until_unix_s(requests.paces, self._selection.lasts_s)
        return self.begin(now_unix_s)
