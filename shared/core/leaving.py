"""The order in which a replica that leaves gives up its requests, so that they go on elsewhere.

A request that moves is computed again by its receiver, or its KV is fetched there where that is
sooner, and it makes no token until then. So:

- What has nothing computed here moves at once.
- What ends here before the replica leaves, even if it uses all its tokens, stays.
- All others move by slack, the most first: who has tokens to spare can best do without for a while,
  and the others have time to end here. Best-effort requests owe nothing and go before them.
- One moves at a time: the next when an equal receiver has the one before, or sooner, if else not
  all could move in time. With several receivers the next comes sooner by so many.

Without a receiver nothing moves. The worker gives up what is left at the end (services/worker).
"""

import math

import numpy as np

from shared.perf.iteration_time import prefill_token_s
from shared.perf.shape import BatchShape
from shared.policy.seam import Phase, View
from shared.schemas import Announce


class Leaving:
    """Whom the replica gives up next, and when."""

    def __init__(self) -> None:
        self._leaves_unix_s = math.inf  # inf: it stays
        self._receivers = 0
        self._move_s = math.inf  # for a token's KV to be fetched; inf: it is computed again
        self._next_unix_s = -math.inf

    def __bool__(self) -> bool:
        """True if the replica is to leave."""
        return self._leaves_unix_s < math.inf

    def synced(self, announce: Announce) -> None:
        """A worker tells its whole state: one that has come back stays, whatever was heard."""
        leaves = announce.leaves_unix_s
        self._leaves_unix_s = math.inf if leaves is None else leaves
        moves = announce.kv_address and announce.kv_move_s
        self._move_s = announce.kv_move_s if moves else math.inf

    def heard(self, announce: Announce, receivers: int) -> None:
        """`receivers`: the replicas of the same model that take requests."""
        self.synced(announce)
        self._receivers = receivers

    def give_up(self, view: View) -> list[int]:
        """The slots that move with the plan which begins at the view's start."""
        if not self._receivers:
            return []
        waits = view.phase == Phase.WAITING
        moving: list[int] = view.slot[waits].tolist()
        left_s = self._leaves_unix_s - view.start_unix_s
        step = BatchShape(
            decodes=int(np.count_nonzero(view.in_decode)),
            decode_context=int(view.computed_tokens[view.in_decode].sum()),
        )
        iteration_s = view.profile.batch_s(step) if step.decodes else 0.0
        to_end_s = (view.max_tokens - view.generated_tokens) * iteration_s
        rows = np.flatnonzero(~waits & ~(view.in_decode & (to_end_s <= left_s)))
        due_unix_s = np.where(view.whole, view.last_due_unix_s - to_end_s, view.next_due_unix_s)
        due_unix_s[view.best_effort] = math.inf
        rows = rows[np.argsort(-due_unix_s[rows], kind="stable")]
        token_s = min(prefill_token_s(view.profile, step), self._move_s)
        costs_s = view.computed_tokens[rows] * token_s / self._receivers
        hurry = max(1.0, float(costs_s.sum()) / left_s) if left_s > 0.0 else math.inf
        self._next_unix_s = max(self._next_unix_s, view.start_unix_s - iteration_s)
        for slot, cost_s in zip(view.slot[rows].tolist(), costs_s.tolist(), strict=True):
            if self._next_unix_s > view.start_unix_s:
                break
            moving.append(slot)
            self._next_unix_s += cost_s / hurry
        return moving
