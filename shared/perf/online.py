"""A profile that is corrected online, by iterations measured on the machine that it is used for."""

from dataclasses import dataclass
from enum import IntEnum
from math import exp, log

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape

# weights of one observation: memories of about 20 observations, of 7, and of 2 or 3
MEMORIES = (0.05, 0.15, 0.4)
JUDGED = 0.1  # weight of one observation in the error of a memory
# Weight of one observation in the settled difference of regimes, the profile's own fault.
APART = 0.02
ROUNDING = 1e-12  # the part of a duration that rounding in sums may lose
SMOOTHED = 0.05  # weight of one observation in scatter and in the exported errors
# Bounds of a ratio: a core shared with six processes is about this slow.
LOWEST, HIGHEST = 1 / 16, 16.0
# One observation claims at most a factor of 2: a stalled iteration is not a slower machine.
FARTHEST = log(2.0)
MARGIN_HIGHEST = 0.1  # fraction of the ratio; policies have safety factors of their own
# A budget divided and multiplied again by the same factor must still fit.
JUST_UNDER = 1 - 1e-12


class Regime(IntEnum):
    DECODE_ONLY = 0
    MIXED = 1
    PREFILL_ONLY = 2

    @staticmethod
    def of(shape: BatchShape) -> "Regime":
        if not shape.prefill_tokens:
            return Regime.DECODE_ONLY
        return Regime.MIXED if shape.decodes else Regime.PREFILL_ONLY


class Speed:
    """log(measured / predicted) over all iterations in three memories, of which the one with the
    smallest recent error counts: the long one while all is quiet, the short one soon after another
    process comes or goes.

    Source: [sola] Eq. 5 for one memory; deviation: logarithms, and three memories.
    """

    __slots__ = ("_logs", "_seen", "_wrong", "log")

    def __init__(self) -> None:
        self._logs = [0.0] * len(MEMORIES)
        self._wrong = [0.0] * len(MEMORIES)
        self._seen = 0
        self.log = 0.0  # of the memory that counts

    def observe(self, value: float) -> None:
        self._seen += 1
        for i, weight in enumerate(MEMORIES):
            off = _within(value - self._logs[i])
            self._wrong[i] += JUDGED * (abs(off) - self._wrong[i])
            # The first weigh 1/2, 1/3, ...: another machine's profile is soon corrected.
            self._logs[i] += max(weight, 1 / (self._seen + 1)) * off
        self.log = self._logs[self._wrong.index(min(self._wrong))]

    def agree(self) -> None:
        """The same as `observe(0)` while every observation was 0."""
        self._seen += 1

    def shift(self, by: float) -> None:
        self._logs = [known + by for known in self._logs]
        self.log += by


class Overhead:
    """The seconds of an iteration beyond its execution: hand-overs, and the worker's own work. The
    estimate leans up by its scatter. One observation may be negative, the overhead never is.
    """

    __slots__ = ("_mean_s", "_scatter_s", "_seen", "seconds")

    def __init__(self) -> None:
        self._mean_s = self._scatter_s = self.seconds = 0.0
        self._seen = 0

    def observe(self, late_s: float, exec_s: float) -> None:
        """An iteration took `late_s` more. If that is above `exec_s`, it is a stall and ignored."""
        self._seen += 1
        off_s = min(max(late_s, -exec_s), exec_s) - self._mean_s
        if not off_s and not self.seconds:
            return
        weight = max(SMOOTHED, 1 / (self._seen + 1))
        self._mean_s += weight * off_s
        self._scatter_s += weight * (abs(off_s) - self._scatter_s)
        self.seconds = max(0.0, self._mean_s + self._scatter_s)


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A profile times a factor per regime, with the overhead of an iteration. A mixed batch is
    never faster than only its decodes or prefills, as the inverse needs.
    """

    base: Profile
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    overhead_s: float = 0.0

    @property
    def name(self) -> str:
        return self.base.name

    def batch_s(self, shape: BatchShape) -> float:
        decode, mixed, prefill = self.factors
        base_s, overhead_s = self.base.batch_s(shape), self.overhead_s
        if not shape.prefill_tokens:
            return decode * base_s + overhead_s if base_s else 0.0
        if not shape.decodes:
            return prefill * base_s + overhead_s
        total_s = mixed * base_s
        if decode > mixed:
            total_s = max(total_s, decode * self.base.batch_s(_decodes(shape)))
        if prefill > mixed:
            total_s = max(total_s, prefill * self.base.batch_s(_prefills(shape)))
        return total_s + overhead_s

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        decode, mixed, prefill = self.factors
        budget_s = budget_s * JUST_UNDER - self.overhead_s
        if not shape.decodes:
            return self.base.prefill_budget(shape, cached, budget_s / prefill, limit)
        if decode > mixed and decode * self.base.batch_s(_decodes(shape)) > budget_s:
            return 0
        chunk = self.base.prefill_budget(shape, cached, budget_s / mixed, limit)
        if prefill > mixed and chunk:
            chunk = self.base.prefill_budget(_prefills(shape), cached, budget_s / prefill, chunk)
        return chunk


class Corrected:
    """A profile scaled by measurements, with the overhead of an iteration; itself a Profile. One
    core owns the profile, and only that core calls `observe`. `now` stays the same object while
    predictions stay the same.

    A slow machine slows all iterations: one shared ratio follows fast. Factors for the regimes, 1
    on average, are learned slowly beside that ratio. Predictions lean up by the regime's scatter.
    The same observations give the same predictions.
    """

    def __init__(self, base: Profile) -> None:
        self._base, self.now = base, Scaled(base)
        self._overhead = Overhead()
        self._speed = Speed()
        self._apart = [0.0, 0.0, 0.0]  # logarithms
        self._seen = [0, 0, 0]
        self._share = [0.0, 0.0, 0.0]  # of recent iterations, by regime
        self._scatter = [0.0, 0.0, 0.0]  # mean absolute deviation from the ratio
        self._gammas = (1.0, 1.0, 1.0)
        self._exact = True  # every iteration so far took exactly what the base predicts
        self._residual: float | None = None
        self._measured_s = self._missing_s = 0.0

    @property
    def name(self) -> str:
        return self._base.name

    @property
    def residual(self) -> float:
        """A metric: |measured - predicted| / measured, smoothed, without the margin."""
        return 0.0 if self._residual is None else self._residual

    @property
    def bias(self) -> float:
        """A metric: (measured - predicted) / measured over recent iterations together."""
        return self._missing_s / self._measured_s if self._measured_s else 0.0

    @property
    def gammas(self) -> tuple[float, float, float]:
        """A metric: the ratios of decode-only, mixed and prefill-only iterations, no margin."""
        return self._gammas

    def observe(self, shape: BatchShape, exec_s: float, late_s: float = 0.0) -> None:
        """Learns that an iteration of this shape took `exec_s`, and that the engine was ready for
        the next one only `late_s` later. An empty shape or no duration teaches nothing.
        """
        base_s = self._base.batch_s(shape)
        if base_s <= 0 or not 0 < exec_s < float("inf"):
            return
        self._overhead.observe(late_s, exec_s)
        regime, factors = Regime.of(shape), self.now.factors
        if self._exact and abs(exec_s - base_s) <= ROUNDING * base_s:
            self._agree(regime, exec_s)
        else:
            self._exact = False
            factors = self._scaled(regime, exec_s, base_s)
        if factors != self.now.factors or self._overhead.seconds != self.now.overhead_s:
            self.now = Scaled(self._base, factors, self._overhead.seconds)

    def _scaled(self, regime: Regime, exec_s: float, base_s: float) -> tuple[float, float, float]:
        """The factors after an iteration that took `exec_s`, where the base predicts `base_s`."""
        self._judge(exec_s, self._gammas[regime] * base_s)
        value = log(min(max(exec_s / base_s, LOWEST), HIGHEST))
        self._speed.observe(value - self._apart[regime])
        self._tell_apart(regime, value)
        self._gammas = self._each(
            [min(max(exp(self._speed.log + apart), LOWEST), HIGHEST) for apart in self._apart]
        )
        # Scatter is the distance from the new ratio, so that a moving ratio adds none.
        weight = max(SMOOTHED, 1 / (self._seen[regime] + 1))
        self._scatter[regime] += weight * (
            abs(exp(value) / self._gammas[regime] - 1) - self._scatter[regime]
        )
        overall = sum(
            share * scatter for share, scatter in zip(self._share, self._scatter, strict=True)
        )
        scatter = [
            known if seen else overall
            for known, seen in zip(self._scatter, self._seen, strict=True)
        ]
        return self._each(
            [
                g * (1 + min(off, MARGIN_HIGHEST))
                for g, off in zip(self._gammas, scatter, strict=True)
            ]
        )

    def _agree(self, regime: Regime, exec_s: float) -> None:
        """`observe` while predictions were exact: only the counts that weigh later ones grow."""
        self._residual = 0.0
        self._measured_s += SMOOTHED * (exec_s - self._measured_s)
        self._speed.agree()
        self._count(regime)

    def _count(self, regime: Regime) -> None:
        self._seen[regime] += 1
        weight = max(APART, 1 / sum(self._seen))
        self._share = [
            share + weight * ((i == regime) - share) for i, share in enumerate(self._share)
        ]

    def _judge(self, exec_s: float, predicted_s: float) -> None:
        off = abs(exec_s - predicted_s) / exec_s
        self._residual = (
            off if self._residual is None else self._residual + SMOOTHED * (off - self._residual)
        )
        self._measured_s += SMOOTHED * (exec_s - self._measured_s)
        self._missing_s += SMOOTHED * (exec_s - predicted_s - self._missing_s)

    def _tell_apart(self, regime: Regime, value: float) -> None:
        """Moves the regime's own part, then shifts what all regimes share into the shared ratio."""
        self._count(regime)
        off = _within(value - self._apart[regime] - self._speed.log)
        self._apart[regime] += max(APART, 1 / (self._seen[regime] + 2)) * off
        common = sum(share * apart for share, apart in zip(self._share, self._apart, strict=True))
        self._apart = [
            apart - common if seen else 0.0
            for apart, seen in zip(self._apart, self._seen, strict=True)
        ]
        self._speed.shift(common)

    @staticmethod
    def _each(values: list[float]) -> tuple[float, float, float]:
        decode, mixed, prefill = values
        return decode, mixed, prefill

    def batch_s(self, shape: BatchShape) -> float:
        return self.now.batch_s(shape)

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return self.now.prefill_budget(shape, cached, budget_s, limit)


def _decodes(shape: BatchShape) -> BatchShape:
    return BatchShape().with_decodes(shape.decodes, shape.decode_context)


def _prefills(shape: BatchShape) -> BatchShape:
    return BatchShape(*shape[:5])


def _within(off: float) -> float:
    return min(max(off, -FARTHEST), FARTHEST)
