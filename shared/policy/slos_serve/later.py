"""Prefills that are due much later, counted as work alone (`long_deadlines=work`). Beyond the
paper.

The paper counts a request with all the KV that it will hold, and as a decode, from its admission on
and for ever. That is right where prefills are due within seconds. A request with half an hour need
hold nothing for most of that time, and it has ended long before another one begins. With this
setting a request that holds no KV yet, and whose prefill is due in more than LATER_S, counts as the
time of its prompt and its output, in prompt tokens; neither its KV nor its decode counts. The
others count as in the paper, so once the prefill is due within LATER_S its KV does, too.
"""

import numpy as np

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools
from shared.policy.slos_serve.demand import Demands
from shared.policy.slos_serve.draft_length import CHUNK_TOKENS, token_s

LATER_S = 20.0
# The tier of an item that counts as no decode.
NO_TIER = -1


def as_work(demands: Demands, later: Bools, profile: Profile) -> Demands:
    """The same demands, those in `later` as work alone."""
    price = decode_tokens(profile, float(demands.context_tokens[later].mean()))
    return demands._replace(
        prefill_tokens=demands.prefill_tokens + np.where(later, price * demands.output_tokens, 0.0),
        blocks=np.where(later, 0, demands.blocks),
    )


def decode_tokens(profile: Profile, context_tokens: float) -> float:
    """The prompt tokens that take as long as one more decode in a batch."""
    one_s = token_s(profile.batch_s)
    if one_s <= 0:
        return 1.0
    beside = BatchShape(CHUNK_TOKENS, 1, CHUNK_TOKENS**2, decodes=1)
    more = beside._replace(decodes=2, decode_context=round(context_tokens))
    return (profile.batch_s(more) - profile.batch_s(beside)) / one_s
