"""Draft lengths: SLOs-Serve's appendix D, one length for each TPOT tier.

A decode that verifies s tokens (s - 1 drafts and its newest token) is counted with Acc(s) tokens,
so its batches may take TPOT Acc(s). Longer batches hold more prefill for the same fixed cost. For
each tier that may bind, and each length of it, the other tiers take the shortest length that does
not bind. Keep the lengths that leave the most prefill tokens per second. With all lengths 1 no
decode drafts.

Where we differ:
- *The draft model reads too.* Before its first step for a request it computes the whole context,
  which the appendix leaves out. So a prompt token costs its own time plus the draft's, as far as
  its tier drafts. The contexts of present decodes that the draft has not read yet are spread over
  the tokens expected of each. A tier drafts only where its gain pays for that as well.
- *Not drafting* means Algorithm 2, where looser tiers rest in some batches. In the appendix every
  decode runs in every batch.
- *Nothing to prefill* (`fastest`): there is no rate to maximise. Then all decodes take the length
  with which they end soonest, in batches that keep every TPOT without luck. A decode that ends
  sooner leaves more time for the prompts that come next. The same holds where no length keeps the
  pace.

alpha is learned from all requests, as in the paper: an accepted draft is a success, the first
rejected one a failure, and those behind it were never tried.

Acc(s) has two forms:
- *mean*, the appendix as written: (1 - alpha^s) / (1 - alpha). A full batch lasts as long as the
  mean allows. So nearly half of the windows of 10 tokens by which section 6 judges TPOT come late,
  and the worst window of a request decides.
- *sure*, ours: 10 / K, where all but LATE_WINDOWS of the windows have their 10 tokens within K
  batches. It is 1 where nothing is drafted and never above the mean. A tier drafts where drafting
  buys time that can be relied on.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from shared.perf.draft import Draft
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Drafts, Floats

# Appendix D: "the maximum speculation decode lengths is below 10".
LONGEST = 9
# Section 6: TPOT is judged over 10 tokens.
WINDOW_TOKENS = 10
# Ours: with this share, 3 % of outputs of 300 tokens (30 windows) have a late window.
LATE_WINDOWS = 0.001
# Ours: no batch prefills more tokens, whatever the time it has.
BATCH_TOKENS = 4096
# Ours: alpha before anything is observed, and the number of drafts that this prior counts for.
PRIOR_ALPHA = 0.7
PRIOR_DRAFTS = 100.0
# Ours: where alpha is below LOW and nobody has drafted for AGAIN iterations with decodes, the prior
# counts again, so that drafts are tried.
LOW, AGAIN = 0.3, 5_000
# Ours: a chunk, when a prompt is priced. The cost of one more token is measured between this many
# and twice as many.
CHUNK_TOKENS = 512
# Ours: tokens that take less than this part of a chunk's seconds cost nothing.
LEAST = 0.01
# Ours: at this many drafts, all earlier ones count half.
FADE_DRAFTS = 20_000.0


class Acceptance:
    """alpha, learned from accepted and rejected drafts.

    Where few are accepted nobody drafts, and so nothing would be seen any more. Therefore drafts
    are tried again now and then.
    """

    def __init__(self) -> None:
        self._tried, self._accepted = PRIOR_DRAFTS, PRIOR_DRAFTS * PRIOR_ALPHA
        self._plain = 0  # iterations with decodes since one last drafted
        self._fresh = True  # nothing was observed, and nothing forgotten

    def begin(self, shares: Sequence[float]) -> None:
        """Begin with the shares by position that were seen on this replica before; no change once
        something was observed or forgotten.
        """
        if shares and self._fresh:
            self._accepted = PRIOR_DRAFTS * sum(shares) / len(shares)

    def forget(self, iterations: int) -> None:
        """This many iterations had decodes, none of which drafted."""
        self._plain += iterations
        if self._plain >= AGAIN and self.alpha < LOW:
            self._tried, self._accepted = PRIOR_DRAFTS, PRIOR_DRAFTS * PRIOR_ALPHA
            self._plain, self._fresh = 0, False

    def observe(self, drafts: Drafts) -> None:
        self._plain, self._fresh = 0, False
        self._accepted += float(drafts.accepted.sum())
        self._tried += float(np.minimum(drafts.accepted + 1, drafts.drafted).sum())
        if self._tried > FADE_DRAFTS:
            self._tried, self._accepted = self._tried / 2, self._accepted / 2

    @property
    def alpha(self) -> float:
        return min(self._accepted / self._tried, 0.99)


def expected_tokens(alpha: float) -> Floats:
    """[LONGEST + 1] the mean number of tokens that s verified tokens yield; 0 for s = 0."""
    return np.array([(1.0 - alpha**s) / (1.0 - alpha) for s in range(LONGEST + 1)])


def sure_tokens(alpha: float) -> Floats:
    """[LONGEST + 1] the tokens per batch that s verified tokens yield for sure. alpha is rounded to
    hundredths.
    """
    return _sure_tokens(round(alpha, 2))


@cache
def _sure_tokens(alpha: float) -> Floats:
    made = [0.0]
    for length in range(1, LONGEST + 1):
        by_one = np.zeros(WINDOW_TOKENS + 1)  # probability of each number of tokens from one batch
        by_one[1 : length + 1] = alpha ** np.arange(length) * (1.0 - alpha)
        by_one[length] = alpha ** (length - 1)
        # probability of fewer tokens than a window from `batches`
        short, batches = by_one[:WINDOW_TOKENS], 1
        while short.sum() > LATE_WINDOWS:
            short, batches = np.convolve(short, by_one)[:WINDOW_TOKENS], batches + 1
        made.append(WINDOW_TOKENS / batches)
    return np.array(made)


class Acc(NamedTuple):
    """Acc(s) by tokens verified: `made` is planned with, `mean` is the mean."""

    made: Floats
    mean: Floats

    @property
    def longest(self) -> int:
        """The most tokens that a decode verifies."""
        return len(self.made) - 1

    def within(self, longest: int) -> "Acc":
        """The same for an engine that verifies no more tokens than `longest` of each decode."""
        if longest >= self.longest:
            return self
        mean = self.mean[: longest + 1]
        return Acc(mean if self.made is self.mean else self.made[: longest + 1], mean)


class Lengths(NamedTuple):
    """`tokens` are verified by a decode of each tier, its newest token included; `batch_s` is the
    longest that a batch may take.
    """

    tokens: tuple[int, ...]
    batch_s: float

    @property
    def drafts(self) -> bool:
        return max(self.tokens) > 1


def verifying(counts: Sequence[int], tokens: Sequence[int], context_tokens: float) -> BatchShape:
    """The shape of `counts` decodes of each tier that verify `tokens` each."""
    decodes, drafts, drafts_sq = 0, 0, 0
    for n, s in zip(counts, tokens, strict=True):
        decodes += n
        drafts += n * (s - 1)
        drafts_sq += n * (s - 1) ** 2
    return BatchShape(
        drafts,
        0,
        float(drafts_sq),
        float(drafts * round(context_tokens)),
        0,
        decodes,
        int(decodes * context_tokens),
        drafts,
    )


def drafting_s(
    draft: Draft, counts: Sequence[int], tokens: Sequence[int], context_tokens: float
) -> float:
    """Seconds of the draft's steps, where its KV is filled. Step k is for all decodes whose length
    is beyond k.
    """
    total_s, step, going = 0.0, 1, sum(counts)
    # Between two lengths all steps are alike.
    for length, n in sorted(zip(tokens, counts, strict=True)):
        if going and length > step:
            step_s = draft.step_s(
                BatchShape(decodes=going, decode_context=int(going * context_tokens))
            )
            for _ in range(step, length):
                total_s += step_s
            step = length
        going -= n
    return total_s


def best_lengths(
    profile: Profile,
    draft: Draft,
    tpot_s: Sequence[float],
    counts: Sequence[int],
    context_tokens: float,
    acc: Acc,
    margin_s: float,
    owed_s: Sequence[float] | None = None,
) -> Lengths:
    """The maximisation of appendix D, for `counts` decodes of tiers with TPOTs `tpot_s`. Of equal
    solutions the shorter lengths win.

    `owed_s`, by tier, is the time of the contexts that the draft has not read yet, in seconds for
    each token that the decodes still make; None means 0. Without any decode all lengths are 1.
    Where not even the decodes alone fit, the lengths are those of `fastest`.
    """
    tiers = [tier for tier, n in enumerate(counts) if n]
    best = Lengths((1,) * len(tpot_s), min((tpot_s[tier] for tier in tiers), default=max(tpot_s)))
    running = in_each(counts, tpot_s, best.batch_s)
    most = plain_tokens(profile, running, best.batch_s, context_tokens, margin_s) / best.batch_s
    for binding in tiers:
        for length in range(1, acc.longest + 1):
            batch_s = tpot_s[binding] * float(acc.made[length])
            tokens = [1] * len(tpot_s)
            for tier in tiers:
                tokens[tier] = (
                    length
                    if tier == binding
                    else int(np.searchsorted(tpot_s[tier] * acc.made, batch_s))
                )
            if max(tokens) > acc.longest:
                continue
            found = Lengths(tuple(tokens), batch_s)
            taken_s = margin_s
            if owed_s is not None:
                taken_s += sum(owed * s for owed, s in zip(owed_s, tokens, strict=True) if s > 1)
            prefills = prefill_tokens(profile, draft, found, counts, context_tokens, taken_s)
            if prefills / batch_s > most:
                best, most = found, prefills / batch_s
    if most >= 0:
        return best
    return fastest(profile, draft, tpot_s, counts, context_tokens, acc, margin_s)


def fastest(
    profile: Profile,
    draft: Draft,
    tpot_s: Sequence[float],
    counts: Sequence[int],
    context_tokens: float,
    acc: Acc,
    margin_s: float,
) -> Lengths:
    """The one length for all decodes that yields the most tokens per second among the lengths that
    keep the tightest pace, if any does. There is at least one decode.

    Where a batch can end within the tightest TPOT it does, so that each of its tokens is in time.
    """
    tightest_s, n = min(tpot_s[tier] for tier, n in enumerate(counts) if n), sum(counts)
    best, most = Lengths((1,) * len(tpot_s), tightest_s), (False, 0.0)
    step_s = draft.step_s(BatchShape(decodes=n, decode_context=int(n * context_tokens)))
    for length in range(1, acc.longest + 1):
        verifying_s = profile.batch_s(verifying((n,), (length,), context_tokens))
        seconds = verifying_s + (length - 1) * step_s
        batch_s = (
            tightest_s if seconds + margin_s <= tightest_s else tightest_s * float(acc.made[length])
        )
        came = (seconds + margin_s <= batch_s, float(acc.mean[length]) / seconds)
        if came > most:
            best, most = Lengths((length,) * len(tpot_s), batch_s), came
    return best


def prefill_tokens(
    profile: Profile,
    draft: Draft | None,
    lengths: Lengths,
    counts: Sequence[int],
    context_tokens: float,
    margin_s: float,
) -> float:
    """The prompt tokens that fit into a batch of these lengths beside its decodes, the draft's
    reading of them included; -inf if the decodes alone do not fit.
    """
    shape = verifying(counts, lengths.tokens, context_tokens)
    budget_s, read = lengths.batch_s - margin_s, 1.0
    if draft is not None and lengths.drafts:
        budget_s -= drafting_s(draft, counts, lengths.tokens, context_tokens)
    if shape.tokens and profile.batch_s(shape) > budget_s:
        return -math.inf
    if draft is not None and lengths.drafts:
        drafting = sum(n for n, s in zip(counts, lengths.tokens, strict=True) if s > 1)
        # 0 where reading the weights takes longer than the prompts
        one_s = token_s(profile.batch_s)
        read += token_s(draft.read_s) / one_s * drafting / max(sum(counts), 1) if one_s > 0 else 0.0
    return profile.prefill_budget(shape, 0, budget_s, BATCH_TOKENS) / read


def in_each(counts: Sequence[int], tpot_s: Sequence[float], batch_s: float) -> int:
    """The decodes in one batch where none drafts: each runs as often as its TPOT asks."""
    share = 0.0
    for n, each_s in zip(counts, tpot_s, strict=True):
        share += n * batch_s / each_s
    return math.ceil(share - 1e-9)


def plain_tokens(
    profile: Profile, decodes: int, batch_s: float, context_tokens: float, margin_s: float
) -> float:
    """The prompt tokens that fit into a batch beside decodes that do not draft; -inf if the decodes
    alone do not fit.
    """
    shape = BatchShape(decodes=decodes, decode_context=int(decodes * context_tokens))
    if decodes and profile.batch_s(shape) > batch_s - margin_s:
        return -math.inf
    return float(profile.prefill_budget(shape, 0, batch_s - margin_s, BATCH_TOKENS))


def token_s(seconds: Callable[[BatchShape], float]) -> float:
    """Seconds of one more prompt token, its attention left out; 0 where that is next to nothing: a
    profile fitted to few long prompts may count all that they cost as attention.
    """
    more_s = seconds(BatchShape(2 * CHUNK_TOKENS)) - seconds(BatchShape(CHUNK_TOKENS))
    whole_s = seconds(BatchShape(CHUNK_TOKENS, 1, CHUNK_TOKENS**2))
    return more_s / CHUNK_TOKENS if more_s > LEAST * whole_s else 0.0
