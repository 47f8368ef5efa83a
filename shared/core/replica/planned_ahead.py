"""The choices that a policy has made ahead for one replica: several choices in a row, or one choice
that stays right for a while.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from shared.core.replica.in_flight import InFlightPlan
from shared.core.replica.request_table import RequestTable
from shared.policy.seam import Choice

Ask = Callable[[], Sequence[Choice]]


class PlannedAhead:
    """Choices made ahead, valid until something other than progress happens: then `forget`."""

    def __init__(self) -> None:
        self._horizon: deque[Choice] = deque()
        self._repeating: Choice | None = None  # right for this many iterations more
        self._repeats_left = 0

    def forget(self) -> None:
        self._horizon.clear()
        self._repeating = None

    def next(self, table: RequestTable, ask: Ask) -> Choice:
        """The choice made ahead, unless all its requests have left; else the policy's answer when
        asked.
        """
        if (
            self._repeating is not None
            and self._repeats_left > 0
            and _still_concerned(self._repeating, table)
        ):
            self._repeats_left -= 1
            return self._repeating
        if not self._horizon or not _still_concerned(self._horizon[0], table):
            self._horizon.clear()
            self._horizon.extend(ask())
        choice = self._horizon.popleft()
        self._repeating, self._repeats_left = None, 0
        if choice.repeats > 1:
            self._repeating = choice
            self._repeats_left = min(choice.repeats, _roomy_iterations(choice, table)) - 1
        return choice

    def repeats(self, table: RequestTable, flights: Sequence[InFlightPlan]) -> int:
        """The number of iterations, the running one included, for which the plan in flight may be
        repeated: 1 unless its choice stays right and no request reaches its maximum before the
        last.
        """
        if self._repeating is None or len(flights) != 1 or not len(flights[0].slots):
            return 1
        if flights[0].expected is not None:
            return 1  # the next one finds nothing
        if flights[0].selection is not None:
            # the number of accepted drafts is known only afterwards: the driver sees whether one
            # more iteration may follow
            alone = not flights[0].shape.prefills and not table.draft_kv_blocks
            return 1 + self._repeats_left if alone else 1
        rows = table.row_of[flights[0].slots[flights[0].decode]]
        tokens = (
            int((table.max_tokens[rows] - table.generated_tokens[rows]).min())
            if len(rows)
            else self._repeats_left
        )
        return 1 + max(0, min(self._repeats_left, tokens))

    def leapt(self, iterations: int) -> None:
        """Count this many of the repeats as run."""
        self._repeats_left -= iterations


def _roomy_iterations(choice: Choice, table: RequestTable) -> int:
    """The number of iterations of the choice that fit so well that no rule about scarce KV applies:
    each entry may begin a block, and one more block is left to each. With less room the policy is
    asked every time.
    """
    free_blocks = table.kv_free_blocks() - 2 * len(choice.slots)
    return free_blocks * table.block_tokens // max(1, int(choice.caps.sum()))


def _still_concerned(choice: Choice, table: RequestTable) -> bool:
    """True if the choice has no entries, or one whose request is still here."""
    rows = table.row_of[choice.slots]
    return not len(rows) or bool(np.count_nonzero(table.plannable(rows)))
