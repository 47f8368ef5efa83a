"""A profile that follows the machine it runs on."""

from enum import IntEnum

from shared.perf.profile import Profile
from shared.perf.shape import BatchShape

WEIGHT = 0.05  # of one observation once settled: forgets with about 20 iterations, half a second of them
LOWEST, HIGHEST = 0.25, 4.0  # bounds of a ratio, and of what one observation may claim: a stalled iteration is not a slower machine
MARGIN_HIGHEST = 0.1  # of the ratio; policies have safety factors of their own
JUST_UNDER = 1 - 1e-12  # so that a budget divided and multiplied again by the same factor still fits


class Regime(IntEnum):
    DECODE_ONLY = 0
    MIXED = 1
    PREFILL_ONLY = 2

    @staticmethod
    def of(shape: BatchShape) -> "Regime":
        if not shape.prefill_tokens:
            return Regime.DECODE_ONLY
        return Regime.MIXED if shape.decodes else Regime.PREFILL_ONLY


class Ratio:
    """measured / predicted, smoothed, with its mean absolute relative deviation.

    gamma = w * measured/predicted + (1 - w) * gamma, clipped to [0.25, 4]. Source: [sola] Eq. 5.
    Deviation: w begins at 1/2 and falls to WEIGHT as 1/(n+1), so that a file made for another machine is corrected within seconds.
    """

    __slots__ = ("deviation", "gamma", "seen")

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma, self.deviation, self.seen = gamma, 0.0, 0

    def observe(self, ratio: float) -> None:
        clipped = min(max(ratio, LOWEST), HIGHEST)
        self.seen += 1
        weight = max(WEIGHT, 1 / (self.seen + 1))
        self.gamma += weight * (clipped - self.gamma)
        # Against the new gamma: while it is still moving, the distance it has to go is not scatter.
        self.deviation += weight * (abs(clipped / self.gamma - 1) - self.deviation)

    @property
    def factor(self) -> float:
        """What to multiply a prediction by: the ratio, leaning up by its own scatter."""
        return self.gamma * (1 + min(self.deviation, MARGIN_HIGHEST))


class Corrected:
    """A profile scaled by what was measured, per regime; itself a Profile. One planner core owns it, and it alone calls `observe`.

    A regime not yet seen takes the ratio over all iterations. Deterministic: the same observations give the same predictions.
    Regimes may have drifted apart, so a mixed batch is never predicted faster than its decodes alone or its prefills alone:
    without that, adding a chunk could make a prediction fall, and the inverse would not be defined.
    """

    def __init__(self, base: Profile) -> None:
        self._base = base
        self._all = Ratio()
        self._ratios: list[Ratio | None] = [None, None, None]
        self._factors = (1.0, 1.0, 1.0)
        self._residual: float | None = None

    @property
    def name(self) -> str:
        return self._base.name

    @property
    def residual(self) -> float:
        """|measured - predicted| / measured after correction, smoothed; 0 before the first observation. A metric."""
        return 0.0 if self._residual is None else self._residual

    @property
    def gammas(self) -> tuple[float, float, float]:
        """The ratio now used for decode-only, mixed and prefill-only iterations, without the margin. A metric."""
        decode, mixed, prefill = (ratio or self._all for ratio in self._ratios)
        return decode.gamma, mixed.gamma, prefill.gamma

    def observe(self, shape: BatchShape, exec_s: float) -> None:
        """Learn that an iteration of this shape took `exec_s`. An empty shape, or no time, teaches nothing."""
        base_s = self._base.batch_s(shape)
        if base_s <= 0 or not 0 < exec_s < float("inf"):
            return
        off = abs(exec_s - self.batch_s(shape)) / exec_s
        self._residual = off if self._residual is None else self._residual + WEIGHT * (off - self._residual)
        regime = Regime.of(shape)
        ratio = self._ratios[regime]
        if ratio is None:
            ratio = self._ratios[regime] = Ratio(self._all.gamma)
        ratio.observe(exec_s / base_s)
        self._all.observe(exec_s / base_s)
        decode, mixed, prefill = (known or self._all for known in self._ratios)
        self._factors = (decode.factor, mixed.factor, prefill.factor)

    def batch_s(self, shape: BatchShape) -> float:
        decode, mixed, prefill = self._factors
        base_s = self._base.batch_s(shape)
        if not shape.prefill_tokens:
            return decode * base_s
        if not shape.decodes:
            return prefill * base_s
        total_s = mixed * base_s
        if decode > mixed:
            total_s = max(total_s, decode * self._base.batch_s(_decodes(shape)))
        if prefill > mixed:
            total_s = max(total_s, prefill * self._base.batch_s(_prefills(shape)))
        return total_s

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        decode, mixed, prefill = self._factors
        budget_s *= JUST_UNDER
        if not shape.decodes:
            return self._base.prefill_budget(shape, cached, budget_s / prefill, limit)
        if decode > mixed and decode * self._base.batch_s(_decodes(shape)) > budget_s:
            return 0
        chunk = self._base.prefill_budget(shape, cached, budget_s / mixed, limit)
        if prefill > mixed and chunk:
            chunk = self._base.prefill_budget(_prefills(shape), cached, budget_s / prefill, chunk)
        return chunk


def _decodes(shape: BatchShape) -> BatchShape:
    return BatchShape(decodes=shape.decodes, decode_context=shape.decode_context)


def _prefills(shape: BatchShape) -> BatchShape:
    return BatchShape(*shape[:5])
