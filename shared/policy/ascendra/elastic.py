"""The elastic batch of a high-priority (HP) instance of Ascendra: as many requests at a time as its
memory allows (section 6.2 of the Ascendra paper).

A prefill is admitted while KV for all of its prompt is free beyond a reserve for decoding. The
reserve follows the history of decode lengths: it is what the running decodes are expected to take
at their peak, each growing to the mean of its application and then leaving. It is never less than a
tenth of the memory (section 8.5).

Where this differs from the paper: the paper states what the reserve is adjusted by, not how; the
peak is ours. A prompt too large for what the reserve leaves begins when it would be alone, since it
would otherwise wait for ever.
"""

from math import ceil

import numpy as np

from shared.policy.chunk import Rows
from shared.policy.lengths import OutputLengths
from shared.policy.seam import View


def reserve_blocks(view: View, lengths: OutputLengths, share: float) -> int:
    """KV blocks that running decodes are expected to take; at least `share` of the capacity."""
    rows = view.in_decode.nonzero()[0]
    least = ceil(share * view.kv_blocks)
    if not len(rows):
        return least
    mean = np.minimum(
        lengths.mean(view.applications)[view.application[rows]], view.max_tokens[rows]
    )
    left = np.maximum(mean - view.generated_tokens[rows], 0.0)
    held = view.top_tokens[rows]
    longest = (-left).argsort(kind="stable")
    # When the decode with the n-th most tokens left ends, n are still there, and each has grown by
    # just that many tokens.
    peak = float((held[longest].cumsum() + left[longest] * np.arange(1, len(rows) + 1)).max())
    return max(least, ceil((peak - int(held.sum())) / view.block_tokens))


def admitted(view: View, begun: Rows, fresh: Rows, reserve: int) -> int:
    """The number of rows of `fresh`, in this order, that may begin beside the decodes and the
    prefills begun.
    """
    blocks = -(-(view.target_tokens[fresh] + view.unsure_tokens[fresh]) // view.block_tokens)
    promised = (
        -(-(view.target_tokens[begun] + view.unsure_tokens[begun]) // view.block_tokens)
        - view.kv_held_blocks[begun]
    )
    room = view.kv_free_blocks - int(np.maximum(promised, 0).sum()) - reserve
    fit = int(blocks.cumsum().searchsorted(room, side="right"))
    alone = not len(begun) and not view.in_decode.any()
    return max(fit, 1) if alone else fit
