"""How long to draft: SLOs-Serve's appendix D, a length for each TPOT tier.

A decode that verifies s tokens (s - 1 drafts and its newest token) makes Acc(s) = (1 - alpha^s) / (1 - alpha) of them in the mean, so its
batches may take TPOT Acc(s). Longer batches hold more prefill for the same fixed cost. For each tier that may bind, and each length of
it, the others take the shortest length that does not bind; kept is what leaves most prefill tokens per second. All lengths 1 is decoding
without a draft.

alpha is learned from what was accepted, over all requests as in the paper: an accepted draft is a success, the first rejected one a
failure, those behind it were never tried. Seconds of drafting are the draft's profile's.

Where we differ: *drafting must be worth it*. Acc is a mean, and a full batch lasts as long as the mean allows, so that nearly half of the
windows of 10 tokens by which TPOT is judged (section 6) come late. Where that buys little, decoding without a draft, which is exact, is
better.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shared.perf.profile import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Drafts, Floats

# Appendix D: "the maximum speculation decode lengths is below 10".
LONGEST = 9
# Ours: drafting must leave so many times the prefill that plain decoding leaves.
WORTH = 1.25
# Ours: no batch prefills more tokens, whatever the time it has.
BATCH_TOKENS = 4096
# Ours: alpha before anything was seen, and how many drafts that counts for.
PRIOR_ALPHA = 0.7
PRIOR_DRAFTS = 100.0
# Ours: at so many drafts all that was seen counts half.
FADE_DRAFTS = 20_000.0


class Acceptance:
    """alpha, learned."""

    def __init__(self) -> None:
        self._tried, self._accepted = PRIOR_DRAFTS, PRIOR_DRAFTS * PRIOR_ALPHA

    def observe(self, drafts: Drafts) -> None:
        self._accepted += float(drafts.accepted.sum())
        self._tried += float(np.minimum(drafts.accepted + 1, drafts.drafted).sum())
        if self._tried > FADE_DRAFTS:
            self._tried, self._accepted = self._tried / 2, self._accepted / 2

    @property
    def alpha(self) -> float:
        return min(self._accepted / self._tried, 0.99)


def expected_tokens(alpha: float) -> Floats:
    """[LONGEST + 1] Acc(s) for s verified tokens; 0 of none."""
    return np.array([(1.0 - alpha**s) / (1.0 - alpha) for s in range(LONGEST + 1)])


class Lengths(NamedTuple):
    """`tokens`: verified by a decode of each tier, its newest one included; `batch_s`: what a batch may take."""

    tokens: tuple[int, ...]
    batch_s: float

    @property
    def drafts(self) -> bool:
        return max(self.tokens) > 1


def verifying(count: int, tokens: int, context_tokens: float) -> BatchShape:
    """The shape of so many decodes that verify `tokens` each."""
    if tokens == 1:
        return BatchShape(decodes=count, decode_context=int(count * context_tokens))
    has = int(count * context_tokens)
    return BatchShape(count * tokens, count, float(count * tokens * tokens), float(tokens * has), has)


def together(shapes: Sequence[BatchShape]) -> BatchShape:
    return BatchShape(*[sum(sums) for sums in zip(*shapes, strict=True)])


def drafting_s(draft: Profile, counts: Sequence[int], tokens: Sequence[int], context_tokens: float) -> float:
    """Seconds of the draft's steps, where its KV is filled: step k for all whose length is beyond k."""
    total_s = 0.0
    for step in range(1, max(tokens)):
        going = sum(n for n, s in zip(counts, tokens, strict=True) if s > step)
        if going:
            total_s += draft.batch_s(BatchShape(decodes=going, decode_context=int(going * context_tokens)))
    return total_s


def best_lengths(
    profile: Profile, draft: Profile, tpot_s: Sequence[float], counts: Sequence[int], context_tokens: float, alpha: float, margin_s: float
) -> Lengths:
    """The maximisation of appendix D, for `counts` decodes of tiers with TPOTs `tpot_s`; of equals the shorter lengths.

    Without any decode lengths are 1. Where not even the decodes alone fit, too.
    """
    made = expected_tokens(alpha)
    tiers = [tier for tier, n in enumerate(counts) if n]
    plain = Lengths((1,) * len(tpot_s), min((tpot_s[tier] for tier in tiers), default=max(tpot_s)))
    plain_rate = prefill_tokens(profile, None, plain, counts, context_tokens, margin_s) / plain.batch_s
    best, most = plain, float("-inf")
    for binding in tiers:
        for length in range(1, LONGEST + 1):
            batch_s = tpot_s[binding] * float(made[length])
            tokens = [1] * len(tpot_s)
            for tier in tiers:
                tokens[tier] = length if tier == binding else int(np.searchsorted(tpot_s[tier] * made, batch_s))
            if max(tokens) > LONGEST:
                continue
            found = Lengths(tuple(tokens), batch_s)
            rate = prefill_tokens(profile, draft, found, counts, context_tokens, margin_s) / batch_s
            if rate > most:
                best, most = found, rate
    return best if most > WORTH * plain_rate else plain


def prefill_tokens(
    profile: Profile, draft: Profile | None, lengths: Lengths, counts: Sequence[int], context_tokens: float, margin_s: float
) -> float:
    """What fits into a batch of these lengths beside its decodes; -inf if these alone do not."""
    shape = together([verifying(n, s, context_tokens) for n, s in zip(counts, lengths.tokens, strict=True)])
    budget_s = lengths.batch_s - margin_s
    if draft is not None and lengths.drafts:
        budget_s -= drafting_s(draft, counts, lengths.tokens, context_tokens)
    if shape.tokens and profile.batch_s(shape) > budget_s:
        return float("-inf")
    return float(profile.prefill_budget(shape, 0, budget_s, BATCH_TOKENS))
