"""Offloading of late requests from a replica for throughput (LP, low priority) to one for urgent
requests (HP, high priority): Ascendra, section 5.3.

A request is urgent once the time to its TTFT deadline is less than the worst case at HP: a batch of
the maximum number of tokens that has just begun there, and the request's own prefill after that.

Where this differs from the paper:
- The paper says only that the threshold is tunable. Here it scales the worst batch
  (`worst_batches`).
- The request's own prefill is predicted alone, in chunks of at most the maximum number of tokens,
  as HP runs it.
- A request that even an idle HP could not serve in time is not offloaded. It would only delay
  others there.
- A request is offloaded once. If no HP takes it, an LP serves it as it can.
- Requests without a TTFT are never urgent; the paper has no such requests. Their deadline is the
  TTLT. Past it they are late like others.
"""

import math

import numpy as np

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.perf.zero_load import ttft_s
from shared.policy.chunk import Rows
from shared.policy.overdue import unstarted
from shared.policy.seam import View

# Prefills are predicted for lengths rounded up to this, so that a long queue takes few predictions.
TILE_TOKENS = 64


def urgent(
    view: View, profile: Profile, *, until_next_s: float, batch_tokens: int, worst_batches: float
) -> Rows:
    """Rows that HP can still serve in time, and for which that is no longer certain if they wait
    here until the policy looks again.

    The policy looks again `until_next_s` from now. `batch_tokens` is the largest batch at HP.
    """
    rows = (unstarted(view) & ~view.offloaded & (view.first_due_unix_s < math.inf)).nonzero()[0]
    left_s = view.first_due_unix_s[rows] - view.start_unix_s
    tokens = view.target_tokens[rows]
    wait_s = until_next_s + worst_batches * profile.batch_s(
        BatchShape().with_chunk(batch_tokens, 0)
    )
    near = left_s < wait_s + ttft_s(profile, int(tokens.max(initial=0)), batch_tokens)
    rows, left_s = rows[near], left_s[near]
    tiles, of = np.unique(-(-tokens[near] // TILE_TOKENS), return_inverse=True)
    own_s = np.array([ttft_s(profile, n * TILE_TOKENS, batch_tokens) for n in tiles.tolist()])[of]
    return rows[(own_s <= left_s) & (left_s < wait_s + own_s)]
