"""The reserve that a chance load needs: how far above its mean the capacity must be, so that little
is lost on average.
"""

import math

MOST = 4.0  # standard deviations: beyond them less than a hundred-thousandth is lost
HALVINGS = 30


def lost(deviations: float) -> float:
    """The mean of what a standard normal value exceeds `deviations` by."""
    density = math.exp(-(deviations**2) / 2) / math.sqrt(2 * math.pi)
    return density - deviations * math.erfc(deviations / math.sqrt(2)) / 2


def deviations(loss: float) -> float:
    """The inverse of `lost`: the standard deviations above the mean at which only `loss` of them
    is lost. 0 where the mean itself is enough.
    """
    low, high = 0.0, MOST
    if loss >= lost(low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if lost(middle) > loss else (low, middle)
    return high
