"""The KV that an offer finds by the time at which its prefill must begin.

Free by then is what is free now, what best-effort requests hold, and what decodes that end by then
give back, less what begun prefills still need and a part of what decodes will grow by. Nobody knows
when an output ends, so each decode is taken to end with the same chance at each instant. In the
mean that is after what is likely left of its output. Of the decodes that end by then in the mean,
SURELY standard deviations fewer are counted on: an offer that is taken in vain waits here until it
is late, while another replica might have KV for it. An offer that is more important than some
request here is taken in any case. The others leave it room, unless they end before it is due.
"""

import math
from collections.abc import Sequence

import numpy as np

from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.overdue import WAITING
from shared.policy.seam import Bools, View
from shared.policy.slackline.due import LIKELY, Due
from shared.policy.slackline.forecast import Work
from shared.schemas import Offer

SURELY = 2.0  # standard deviations
# The part of the likely growth of decodes that is kept for them: some end while others grow.
GROWTH = 0.25
LEAST_STEP_S = 1e-3  # before any iteration was seen


def finds_no_kv(
    view: View,
    due: Due,
    decodes: Rows,
    coming: Sequence[Offer],
    work: Work,
    step_s: float,
    *,
    asked: int,
) -> Bools:
    """[asked] those with a TTFT that would find no KV in time, while another replica
    may be asked. Standard prefills that are due before them come first, and more important ones
    also if they are due before such an offer would give back its KV.

    decodes: the standard ones.
    coming: what is promised, and then the `asked` offers; each counts for those after it, but for
        those that find none. `work` is theirs.
    step_s: seconds of an iteration lately.
    """
    found, promised = np.zeros(asked, dtype=np.bool_), len(coming) - asked
    standard, size = view.standard, view.block_tokens
    begun = ((view.phase == chunk.PREFILL) & standard).nonzero()[0]
    waiting = ((view.phase == WAITING) & standard).nonzero()[0]
    to_come = -(-view.target_tokens[begun] // size) - view.kv_held_blocks[begun]
    likely = LIKELY * due.output_tokens[decodes]
    growth = GROWTH * float(likely.sum()) / size
    held = view.kv_held_blocks[~standard]
    free = view.kv_free_blocks + int(held.sum()) - int(to_come.sum()) - len(decodes) - growth
    blocks = -(-view.target_tokens[waiting] // size)
    needs = [chunk.blocks(offer.prompt_tokens + offer.generated_tokens, size) for offer in coming]
    if int(blocks.sum()) + sum(needs) <= free:
        return found
    due_s = np.concatenate((due.prefill_unix_s[waiting] - view.start_unix_s, work.due_s))
    blocks = np.concatenate((blocks, needs))
    value = np.concatenate((view.importance[waiting], work.value))
    least = min(float(value.min()), float(view.importance[decodes].min(initial=math.inf)))
    ends_s, gives = math.inf, 0.0  # a decode ends after so long in the mean, with so many blocks
    if len(decodes):
        ends_s = max(float(likely.mean()), 1.0) * max(step_s, LEAST_STEP_S)
        gives = (float(view.kv_held_blocks[decodes].sum()) + growth) / len(decodes)
    for k, offer in enumerate(coming[promised:]):
        n = len(waiting) + promised + k
        dated = math.isfinite(offer.next_due_unix_s)
        if not dated or not offer.hops_left or value[n] > least:
            continue
        begin_s = float(due_s[n] - work.seconds[promised + k])
        going_on = math.exp(-max(begin_s, 0.0) / ends_s)
        ended = len(decodes) * (1.0 - going_on)
        surely = max(ended - SURELY * math.sqrt(ended * going_on), 0.0)
        more_important = value[: n + 1] > value[n]
        until_s = due_s[n] + np.where(more_important, ends_s, 0.0)
        before = due_s[: n + 1] <= until_s
        if int(blocks[: n + 1][before].sum()) > free + gives * surely:
            found[k], blocks[n] = True, 0
    return found
