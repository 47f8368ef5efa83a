"""AdaServe's adaptive control: the depth and width of speculation, and the verification budget
([adaserve] section 5.2).

Budgets come "from hardware profiling", by "roofline models", and are to be "an optimal budget that
balances decoding throughput and latency" (sections 1 and 3); the paper prints no rule. This file
takes the batch with the most throughput per latency, B / T(B)^2, on the profile's curve over
tokens. For an ideal roofline that batch is its ridge; for T = a + k B it is the batch whose tokens
cost as much as its start. B1 is this batch for the target model. B2, for the draft model, is the
same: a step takes one fraction of the target's time, whatever the number of beams. (The authors'
artifact passes 512 and 96 for Llama-70B, measured on eight A100s of 40 GB.)
"""

from typing import NamedTuple

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape

# The largest batch considered. Every profile we have is bound by compute long before it.
LONGEST_TOKENS = 2048
# The paper gives no n_max. In the authors' published code a need adds at most this many mean shares
# of the budget that the roots leave.
NEED_SHARE = 1.2


class Bounds(NamedTuple):
    """The constants of Eq. 8 and 9. The caller states where its values come from."""

    depth_max: int
    depth_min: int
    width_max: int
    c1: int
    c2: int


class Tree(NamedTuple):
    """The speculation of one iteration. `budget_tokens` are verified by all requests together,
    roots included.
    """

    depth: int
    width: int
    budget_tokens: int
    needed_limit_tokens: int  # n_max, the root included as in Algorithm 2, line 12


def balanced_tokens(profile: Profile) -> int:
    """The B from 1 to LONGEST_TOKENS with the largest B / T(B)^2, where all but one are drafts,
    which a profile may say cost more than a prompt's tokens. Attention is left out, since a context
    is read once however many tokens are verified.

    The search takes some milliseconds.
    """

    def goodness(tokens: int) -> float:
        drafts = tokens - 1
        shape = BatchShape(prefill_tokens=drafts, decodes=1, drafts=drafts)
        return tokens / profile.batch_s(shape) ** 2

    return max(range(1, LONGEST_TOKENS + 1), key=goodness)


def least_depth(budget_tokens: int, max_requests: int, depth_max: int) -> int:
    """D_min: the depth by Eq. 8 while as many requests decode as may, at least 1, so that it does
    not bind before.

    The artifact's D_min is this for Llama-70B (512 // 96 - 1 = 4), and one more for Qwen2.5-32B
    (3, with 256 // 80 - 1 = 2). With a smaller budget its values bind: requests draft levels of
    which the budget verifies none.
    """
    return min(max(1, budget_tokens // max_requests - 1), depth_max)


def tree(requests: int, verified_tokens: int, drafted_tokens: int, bounds: Bounds) -> Tree | None:
    """Depth, width and budgets for `requests` decodes (at least 1), by Eq. 8 and 9 with B1 =
    `verified_tokens` and B2 = `drafted_tokens`. None where the roots alone use the budget up.

    Deviation: Algorithm 2 cannot have more requests than budget, and Eq. 8 would have them draft
    D_min deep for nothing.
    """
    if verified_tokens <= requests:
        return None
    depth = max(
        bounds.depth_min, min(bounds.depth_max, verified_tokens // (requests + bounds.c1) - 1)
    )
    width = max(1, min(bounds.width_max, drafted_tokens // requests + bounds.c2))
    return Tree(
        depth,
        width,
        verified_tokens,
        needed_limit_tokens=1 + int(NEED_SHARE * (verified_tokens - requests) / requests),
    )
