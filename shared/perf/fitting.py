"""Fits a profile to measured iterations, in the piecewise form of shared/perf/forms.py, and states
the error that remains.

The fit minimises the mean of |predicted - measured| / measured, with no coefficient below 0, so it
is monotone, and a few stalls do not pull it. Its error is cross-validated: each iteration is judged
by a fit that did not see it. The same timings give the same file.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.perf.forms import Attention, PiecewiseTokens
from shared.perf.iteration_time import Profile
from shared.perf.online import Regime
from shared.perf.profile_file import FitError, ProfileFile
from shared.perf.shape import BatchShape

LEAST = 40  # timings needed: about three for each coefficient
KNOTS = (0, 8, 32, 128, 512)  # tokens at which the cost of one more may change
FOLDS = 5
PASSES = 12  # passes of reweighting; after eight the coefficients have settled to under 1 %
# Weights treat a smaller relative error as this one: clocks and caches explain that much.
CLOSE = 0.02
# No prediction is below this fraction of the shortest measured time.
FASTEST = 0.1
DIGITS = 6  # significant digits of a coefficient

Column = NDArray[np.float64]


class Timed(NamedTuple):
    """One iteration as it ran."""

    shape: BatchShape
    exec_s: float


def fit(
    timings: Sequence[Timed],
    *,
    name: str,
    gpu: str,
    model: str,
    kv_capacity_tokens: int,
    provenance: str,
) -> ProfileFile:
    """The profile of these timings. Raises ValueError for too few, or one without a duration."""
    if len(timings) < LEAST:
        raise ValueError(f"{len(timings)} timings are too few to fit a profile: it takes {LEAST}")
    if not all(0 < timed.exec_s < float("inf") for timed in timings):
        raise ValueError("every timing must have a duration")
    return ProfileFile(
        name=name,
        gpu=gpu,
        model=model,
        tensor_parallel=1,
        kv_capacity_tokens=kv_capacity_tokens,
        kv_bytes_per_token=0,
        overhead_s=0.0,
        error=_cross_validated(timings),
        provenance=provenance,
        coefficients=coefficients(timings),
    )


def coefficients(timings: Sequence[Timed]) -> PiecewiseTokens:
    """The form fitted to all of the timings."""
    largest = max(timed.shape.tokens for timed in timings)
    knots = tuple(knot for knot in KNOTS if knot == 0 or 2 * knot <= largest)
    design = _design([timed.shape for timed in timings], knots)
    exec_s = np.array([timed.exec_s for timed in timings])
    found = least_relative_error(design, exec_s)
    found[0] = max(found[0], FASTEST * float(exec_s.min()))
    c, *rest = (float(f"{value:.{DIGITS}g}") for value in found)
    steps, (e, p1, p2, d0, d1, d2, v) = rest[: len(knots)], rest[len(knots) :]
    slopes = tuple(step - before for step, before in zip(steps, [0.0, *steps[:-1]], strict=True))
    attention = Attention(e=e, p1=p1, p2=p2, d0=d0, d1=d1, d2=d2, v=v)
    return PiecewiseTokens(tile=1, knots=knots, slopes=slopes, c=c, attention=attention)


def error_of(profile: Profile, timings: Sequence[Timed], against: str) -> FitError:
    """The error of `profile` on these timings. Raises ValueError if there are none."""
    if not timings:
        raise ValueError("no timings to compare with")
    off = [abs(profile.batch_s(shape) / exec_s - 1) for shape, exec_s in timings]
    return _fit_error([Regime.of(timed.shape) for timed in timings], np.array(off), against)


def _cross_validated(timings: Sequence[Timed]) -> FitError:
    off = np.zeros(len(timings))
    for fold in range(FOLDS):
        profile = coefficients(
            [timed for n, timed in enumerate(timings) if n % FOLDS != fold]
        ).profile("fold", 0.0)
        for n in range(fold, len(timings), FOLDS):
            off[n] = abs(profile.batch_s(timings[n].shape) / timings[n].exec_s - 1)
    against = (
        f"{len(timings)} iterations in {FOLDS} parts, each judged by a fit to the other {FOLDS - 1}"
    )
    return _fit_error([Regime.of(timed.shape) for timed in timings], off, against)


def _fit_error(regimes: Sequence[Regime], off: Column, against: str) -> FitError:
    def mape(regime: Regime) -> float | None:
        among = off[[r is regime for r in regimes]]
        return round(float(among.mean()), 4) if len(among) else None

    return FitError(
        against=against,
        mape=round(float(off.mean()), 4),
        p95=round(float(np.quantile(off, 0.95)), 4),
        worst=round(float(off.max()), 4),
        mape_decode_only=mape(Regime.DECODE_ONLY),
        mape_mixed=mape(Regime.MIXED),
        mape_prefill_only=mape(Regime.PREFILL_ONLY),
    )


def _design(shapes: Sequence[BatchShape], knots: Sequence[int]) -> Column:
    """[timings, coefficients]: 1, tokens between knots, chunks, the prefills' sums, any decode,
    decodes, their context, their drafts. Tokens are counted between knots rather than above them,
    so that coefficients >= 0 make the curve rise, but need not make it convex.
    """
    rows = np.array(shapes, dtype=np.float64)
    prefills, square, cross, decodes, context, drafts = rows[:, [1, 2, 3, 5, 6, 7]].T
    tokens = rows[:, 0] + decodes
    between = [
        np.clip(tokens - low, 0, high - low)
        for low, high in zip(knots, [*knots[1:], np.inf], strict=True)
    ]
    ones = np.ones(len(rows))
    return np.column_stack(
        [ones, *between, prefills, cross, square, decodes > 0, decodes, context, drafts]
    )


def least_relative_error(design: Column, exec_s: Column) -> Column:
    """Coefficients >= 0 that nearly minimise the mean of |design @ x - exec_s| / exec_s."""
    relative = design / exec_s[:, None]
    weights = np.ones(len(exec_s))
    for _ in range(PASSES):
        found = non_negative(relative * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(relative @ found - 1), CLOSE))
    return found


def non_negative(a: Column, b: Column) -> Column:
    """x >= 0 that minimises |a @ x - b|. Source: Lawson and Hanson, Solving Least Squares Problems,
    chapter 23; deviation: none.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    tiny = 1e-10 * max(1.0, float(np.linalg.norm(b)))
    for _ in range(3 * a.shape[1]):  # more than any observed run took
        gain = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gain.max() <= tiny:
            break
        free[gain.argmax()] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            # x is above 0 where free, or was freed just now and is 0
            step = float((x[below] / (x[below] - best[below])).min())
            x = x + step * (best - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = best
    found: Column = x / scale
    return found
