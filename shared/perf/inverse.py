"""The inverse of a profile: the most tokens whose iteration fits a time, found by bisection."""

from collections.abc import Callable

from shared.perf.shape import BatchShape


def largest_chunk(
    batch_s: Callable[[BatchShape], float],
    shape: BatchShape,
    cached: int,
    budget_s: float,
    limit: int,
    guess: int | None = None,
) -> int:
    """The most tokens (0..limit) of one more chunk on `cached` tokens whose seconds fit `budget_s`.

    `batch_s` must be monotone. The returned chunk was itself evaluated, so it fits despite
    rounding. `guess` (0..limit, `limit` without one) saves time where it is right.
    """
    near = limit if guess is None else guess
    fits, exceeds = 0, limit + 1
    for probe in (near + 1, near):
        if fits < probe < exceeds:
            if batch_s(shape.with_chunk(probe, cached)) <= budget_s:
                fits = probe
            else:
                exceeds = probe
    while exceeds - fits > 1:
        middle = (fits + exceeds) >> 1
        if batch_s(shape.with_chunk(middle, cached)) <= budget_s:
            fits = middle
        else:
            exceeds = middle
    return fits
