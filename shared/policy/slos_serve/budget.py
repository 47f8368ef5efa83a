"""The rate of prefill tokens that fit beside n decodes of each TPOT tier while these keep their
pace: PB*(t, n) of SLOs-Serve, Eq. 2 and 3.

Without a draft, batches follow Algorithm 2: each is as long as the tightest TPOT among the decodes,
each decode runs in as many batches as its own TPOT asks, and the rest is prefill. With a draft,
they have the lengths of appendix D where these give more. All decodes have the mean context.
"""

from collections.abc import Sequence

import numpy as np

from shared.perf.draft import Draft
from shared.perf.iteration_time import Profile
from shared.policy.seam import Floats
from shared.policy.slos_serve.draft_length import Lengths, in_each, plain_tokens, prefill_tokens
from shared.policy.slos_serve.programme import Counts

# Ours: the most tiers that are kept apart. Beyond, the closest are counted with their tighter
# neighbour. The paper has two or three.
MAX_TIERS = 4


class PrefillRate:
    """The `Rate` of programme.py, by a profile. `idle_s` is how long a batch may take while nothing
    decodes.
    """

    def __init__(
        self,
        profile: Profile,
        tpot_s: Sequence[float],
        context_tokens: float,
        idle_s: float,
        margin_s: float,
        draft: Draft | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self._profile, self._tpot_s, self._context = profile, tpot_s, context_tokens
        self._idle_s, self._margin_s = idle_s, margin_s
        self._draft, self._lengths = draft, lengths
        self._plain: dict[tuple[float, int], float] = {}
        self._of: dict[tuple[int, ...], float] = {}

    def of(self, counts: tuple[int, ...]) -> float:
        rate = self._of.get(counts)
        if rate is None:
            rate = self._of[counts] = self._rate(counts)
        return rate

    def along(self, counts: Counts) -> Floats:
        return np.array([self.of(tuple(row)) for row in counts.tolist()], dtype=np.float64)

    def _rate(self, counts: tuple[int, ...]) -> float:
        batch_s = next(
            (tpot_s for tpot_s, n in zip(self._tpot_s, counts, strict=True) if n), self._idle_s
        )
        decodes = in_each(counts, self._tpot_s, batch_s)
        key = (batch_s, decodes)
        rate = self._plain.get(key)
        if rate is None:
            rate = self._plain[key] = (
                plain_tokens(self._profile, decodes, batch_s, self._context, self._margin_s)
                / batch_s
            )
        if self._lengths is not None and self._lengths.drafts:
            drafted = prefill_tokens(
                self._profile, self._draft, self._lengths, counts, self._context, self._margin_s
            )
            rate = max(rate, drafted / self._lengths.batch_s)
        return rate


def tiers_of(tpot_s: Floats) -> tuple[float, ...]:
    """Rising: the distinct TPOTs, the closest merged into the tighter until there are few enough.
    One at least.
    """
    found = sorted(set(tpot_s.tolist())) or [1.0]
    while len(found) > MAX_TIERS:
        closest = min(range(1, len(found)), key=lambda n: found[n] / found[n - 1])
        del found[closest]
    return tuple(found)


def tier_along(tpot_s: Floats, tiers: Sequence[float]) -> Counts:
    """[requests] the loosest tier that is no looser than each one's TPOT."""
    return np.maximum(np.searchsorted(np.array(tiers), tpot_s, side="right") - 1, 0).astype(
        np.int64
    )
