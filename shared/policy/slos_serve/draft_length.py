"""How long to draft: SLOs-Serve's appendix D, a length for each TPOT tier.

A decode that verifies s tokens (s - 1 drafts and its newest token) is counted with Acc(s) tokens,
so its batches may take TPOT Acc(s). Longer batches hold more prefill for the same fixed cost. For
each tier that may bind, and each length of it, the others take the shortest length that does not
bind; kept is what leaves most prefill tokens per second. All lengths 1 is decoding without a draft.

Where we differ:
- *The draft model reads too.* Before its first step for a request it computes the whole context,
  which the appendix leaves out. So a prompt token counts as one and what it takes the draft, as far
  as its tier drafts; and what the decodes there are still owe is spread over the tokens expected of
  each. A tier drafts only where that is paid for as well.
- *Not drafting* is what Algorithm 2 makes of it: looser tiers rest in some batches. In the appendix
  every decode runs in every batch.
- *Nothing to prefill* (`fastest`): there is no rate to maximise. Then everybody drafts so far as
  decodes end soonest, in batches that keep every TPOT without luck: who ends sooner leaves more for
  the prompts that come next. The same where no length keeps the pace.

alpha is learned from what was accepted, over all requests as in the paper: an accepted draft is a
success, the first rejected one a failure, those behind it were never tried. Seconds of drafting are
the draft's profile's.

What Acc(s) is, is a choice:
- *mean*, the appendix as written: (1 - alpha^s) / (1 - alpha). A full batch lasts as long as the
  mean allows, so of the windows of 10 tokens by which section 6 judges TPOT nearly half come late,
  and the worst of a request's decides.
- *sure*, ours: 10 / K, where in K batches all but LATE_WINDOWS make 10 tokens. It is 1 where
  nothing is drafted, never above the mean, and a tier drafts where it buys time that can be relied
  on.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Drafts, Floats

# Appendix D: "the maximum speculation decode lengths is below 10".
LONGEST = 9
# Section 6: TPOT is judged over 10 tokens.
WINDOW_TOKENS = 10
# Ours: of an output of 300 tokens, 30 windows, then 3 % have one that is late.
LATE_WINDOWS = 0.001
# Ours: no batch prefills more tokens, whatever the time it has.
BATCH_TOKENS = 4096
# Ours: alpha before anything was seen, and how many drafts that counts for.
PRIOR_ALPHA = 0.7
PRIOR_DRAFTS = 100.0
# Ours: the seconds of one more prompt token are those between so many and twice as many.
CHUNK_TOKENS = 512
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
    """[LONGEST + 1] the mean of what s verified tokens make; 0 of none."""
    return np.array([(1.0 - alpha**s) / (1.0 - alpha) for s in range(LONGEST + 1)])


def sure_tokens(alpha: float) -> Floats:
    """[LONGEST + 1] what s verified tokens make for sure, a batch; alpha counts in hundredths."""
    return _sure_tokens(round(alpha, 2))


@cache
def _sure_tokens(alpha: float) -> Floats:
    made = [0.0]
    for length in range(1, LONGEST + 1):
        by_one = np.zeros(WINDOW_TOKENS + 1)  # the chance of so many tokens of one batch
        by_one[1 : length + 1] = alpha ** np.arange(length) * (1.0 - alpha)
        by_one[length] = alpha ** (length - 1)
        short, batches = by_one[:WINDOW_TOKENS], 1  # of fewer than a window's, of all batches
        while short.sum() > LATE_WINDOWS:
            short, batches = np.convolve(short, by_one)[:WINDOW_TOKENS], batches + 1
        made.append(WINDOW_TOKENS / batches)
    return np.array(made)


class Acc(NamedTuple):
    """Acc(s), by tokens verified: what a pace is planned with, and the mean."""

    made: Floats
    mean: Floats


class Lengths(NamedTuple):
    """`tokens`: verified by a decode of each tier, its newest one included; `batch_s`: what a batch
    may take.
    """

    tokens: tuple[int, ...]
    batch_s: float

    @property
    def drafts(self) -> bool:
        return max(self.tokens) > 1


def verifying(counts: Sequence[int], tokens: Sequence[int], context_tokens: float) -> BatchShape:
    """The shape of so many decodes of each tier that verify `tokens` each."""
    drafts = np.repeat(np.array(tokens, dtype=np.int32) - 1, counts)
    has = np.full(len(drafts), round(context_tokens), dtype=np.int32)
    return BatchShape(
        decodes=len(drafts), decode_context=int(len(drafts) * context_tokens)
    ).with_drafts(drafts, has)


def drafting_s(
    draft: Profile, counts: Sequence[int], tokens: Sequence[int], context_tokens: float
) -> float:
    """Seconds of the draft's steps, where its KV is filled: step k for all whose length is beyond
    k.
    """
    total_s = 0.0
    for step in range(1, max(tokens)):
        going = sum(n for n, s in zip(counts, tokens, strict=True) if s > step)
        if going:
            total_s += draft.batch_s(
                BatchShape(decodes=going, decode_context=int(going * context_tokens))
            )
    return total_s


def best_lengths(
    profile: Profile,
    draft: Profile,
    tpot_s: Sequence[float],
    counts: Sequence[int],
    context_tokens: float,
    acc: Acc,
    margin_s: float,
    owed_s: Sequence[float] | None = None,
) -> Lengths:
    """The maximisation of appendix D, for `counts` decodes of tiers with TPOTs `tpot_s`; of equals
    the shorter lengths.

    `owed_s`: by tier, what the draft has not read yet of its decodes, in seconds for each token
    that they still make; None: nothing. Without any decode lengths are 1. Where not even the
    decodes alone fit, those of `fastest`.
    """
    tiers = [tier for tier, n in enumerate(counts) if n]
    best = Lengths((1,) * len(tpot_s), min((tpot_s[tier] for tier in tiers), default=max(tpot_s)))
    running = in_each(counts, tpot_s, best.batch_s)
    most = plain_tokens(profile, running, best.batch_s, context_tokens, margin_s) / best.batch_s
    for binding in tiers:
        for length in range(1, LONGEST + 1):
            batch_s = tpot_s[binding] * float(acc.made[length])
            tokens = [1] * len(tpot_s)
            for tier in tiers:
                tokens[tier] = (
                    length
                    if tier == binding
                    else int(np.searchsorted(tpot_s[tier] * acc.made, batch_s))
                )
            if max(tokens) > LONGEST:
                continue
            found = Lengths(tuple(tokens), batch_s)
            now_s = (
                sum(owed * s for owed, s in zip(owed_s, tokens, strict=True) if s > 1)
                if owed_s is not None
                else 0.0
            )
            rate = (
                prefill_tokens(profile, draft, found, counts, context_tokens, margin_s + now_s)
                / batch_s
            )
            if rate > most:
                best, most = found, rate
    return (
        best
        if most >= 0
        else fastest(profile, draft, tpot_s, counts, context_tokens, acc, margin_s)
    )


def fastest(
    profile: Profile,
    draft: Profile,
    tpot_s: Sequence[float],
    counts: Sequence[int],
    context_tokens: float,
    acc: Acc,
    margin_s: float,
) -> Lengths:
    """The one length for all with which most tokens come a second, of those that keep the tightest
    pace, if any does. Some decode there is.

    A batch takes no longer than the tightest TPOT, so that each of its tokens is in time, if that
    is enough for it.
    """
    tightest_s, n = min(tpot_s[tier] for tier, n in enumerate(counts) if n), sum(counts)
    best, most = Lengths((1,) * len(tpot_s), tightest_s), (False, 0.0)
    step_s = drafting_s(draft, (n,), (2,), context_tokens)
    for length in range(1, LONGEST + 1):
        seconds = (
            profile.batch_s(verifying((n,), (length,), context_tokens)) + (length - 1) * step_s
        )
        batch_s = (
            tightest_s if seconds + margin_s <= tightest_s else tightest_s * float(acc.made[length])
        )
        came = (seconds + margin_s <= batch_s, float(acc.mean[length]) / seconds)
        if came > most:
            best, most = Lengths((length,) * len(tpot_s), batch_s), came
    return best


def prefill_tokens(
    profile: Profile,
    draft: Profile | None,
    lengths: Lengths,
    counts: Sequence[int],
    context_tokens: float,
    margin_s: float,
) -> float:
    """What fits into a batch of these lengths beside its decodes, the draft's reading of it
    included; -inf if these alone do not.
    """
    shape = verifying(counts, lengths.tokens, context_tokens)
    budget_s, read = lengths.batch_s - margin_s, 1.0
    if draft is not None and lengths.drafts:
        budget_s -= drafting_s(draft, counts, lengths.tokens, context_tokens)
        drafting = sum(n for n, s in zip(counts, lengths.tokens, strict=True) if s > 1)
        one_s = token_s(profile)  # 0 where prompts are no longer than what the weights take to read
        read += token_s(draft) / one_s * drafting / max(sum(counts), 1) if one_s > 0 else 0.0
    if shape.tokens and profile.batch_s(shape) > budget_s:
        return -math.inf
    return profile.prefill_budget(shape, 0, budget_s, BATCH_TOKENS) / read


def in_each(counts: Sequence[int], tpot_s: Sequence[float], batch_s: float) -> int:
    """Decodes in a batch where nobody drafts: each runs in every so many of them as its TPOT
    asks.
    """
    return math.ceil(
        sum(n * batch_s / each_s for n, each_s in zip(counts, tpot_s, strict=True)) - 1e-9
    )


def plain_tokens(
    profile: Profile, decodes: int, batch_s: float, context_tokens: float, margin_s: float
) -> float:
    """What fits into a batch beside decodes that do not draft; -inf if these alone do not."""
    shape = BatchShape(decodes=decodes, decode_context=int(decodes * context_tokens))
    if decodes and profile.batch_s(shape) > batch_s - margin_s:
        return -math.inf
    return float(profile.prefill_budget(shape, 0, batch_s - margin_s, BATCH_TOKENS))


def token_s(profile: Profile) -> float:
    """Seconds that one more prompt token takes, its attention left out."""
    return (
        profile.batch_s(BatchShape(2 * CHUNK_TOKENS)) - profile.batch_s(BatchShape(CHUNK_TOKENS))
    ) / CHUNK_TOKENS
