"""The inverse of any monotone profile, by bisection."""

from collections.abc import Callable

from shared.perf.shape import BatchShape


def largest_chunk(
    batch_s: Callable[[BatchShape], float],
    shape: BatchShape,
    cached: int,
    budget_s: float,
    limit: int,
) -> int:
    """The most tokens (0..limit) of one more chunk on `cached` tokens whose predicted seconds fit
    `budget_s`.

    `batch_s` must be monotone. The returned value was itself evaluated, so it fits despite
    rounding.
    """
    if limit <= 0:
        return 0
    if batch_s(shape.with_chunk(limit, cached)) <= budget_s:
        return limit
    fits, exceeds = 0, limit
    while exceeds - fits > 1:
        middle = (fits + exceeds) >> 1
        if batch_s(shape.with_chunk(middle, cached)) <= budget_s:
            fits = middle
        else:
            exceeds = middle
    return fits
