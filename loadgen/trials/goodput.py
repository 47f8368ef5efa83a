"""Searches for the capacity of a policy: the highest rate of arrivals at which few enough requests
miss their SLO.

The search doubles or halves a first rate until one rate passes and a higher one fails, and then
bisects (geometrically) until both are within the precision of each other. The result is the largest
rate *tried* that passes and whose next step up fails. Near the limit the fraction violated is not
monotone in the rate: batches form differently, one long prompt arrives a moment earlier. So another
first rate or seed may give another answer. The difference is the noise of the figure; a longer run
has less of it. Every rate is tried with the same seed: the same requests, their gaps scaled.
"""

import math
from collections.abc import Callable, Mapping

from msgspec import Struct

from shared.errors import ConfigError

# a trace of few requests may never miss enough of them, however fast they come
HIGHEST_RPS = 100_000.0
DIGITS = 4  # of a rate that is tried


class Probe(Struct, frozen=True, kw_only=True):
    """One rate tried. `stopped`: it ended early, so the fraction is a lower bound."""

    rate_rps: float
    offered: int
    violated_fraction: float
    stopped: bool


def find_capacity(
    probe: Callable[[float], Probe],
    violations: float,
    precision: float,
    first_rps: float,
    lowest_rps: float,
) -> float:
    """The capacity in requests per second; 0 if even the lowest rate tried fails. `violations`: the
    fraction of requests that may be violated; `precision` is relative.

    Raises ConfigError if no rate fails.
    """
    known: dict[float, bool] = {}
    while (rate_rps := next_rate(known, precision, first_rps, lowest_rps)) is not None:
        if rate_rps > HIGHEST_RPS:
            raise ConfigError(
                f"no limit found: at {max(known):g} requests/s no more than "
                f"{100 * violations:g} % are violated; offer more"
            )
        known[rate_rps] = probe(rate_rps).violated_fraction <= violations
    return max((rate for rate, passed in known.items() if passed), default=0.0)


def next_rate(
    known: Mapping[float, bool], precision: float, first_rps: float, lowest_rps: float
) -> float | None:
    """The rate to try next, given which rates have passed; None when the capacity is found."""
    passed = [rate for rate, well in known.items() if well]
    failed = [rate for rate, well in known.items() if not well]
    if not known:
        return first_rps
    if not failed:
        return 2 * max(passed)
    if not passed:
        half_rps = min(failed) / 2
        return half_rps if half_rps >= lowest_rps else None
    low_rps, high_rps = max(passed), min(failed)
    middle_rps = float(f"{math.sqrt(low_rps * high_rps):.{DIGITS}g}")
    if high_rps <= low_rps * (1 + precision) or not low_rps < middle_rps < high_rps:
        return None
    return middle_rps
