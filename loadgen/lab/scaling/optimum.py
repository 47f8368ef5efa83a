"""The fewest replica-hours in hindsight that keep the objective.

Each quarter of an hour is served by every fixed number of replicas from the one that drowns to the
one with which nothing misses; so it is known which requests of each minute miss with each number. A
dynamic program then picks a number for each minute: its seconds are paid, and the warm-up of each
replica that is added. A price for each miss is searched, so that as many miss as may. It takes a
minute's misses for those of a fleet that always had that number, which is too many after a burst
and too few in one that begins with work left over; so the timetable is served by simulation, and
the number that may miss is searched. It is near the optimum, and no proof of a lower bound.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 60.0
HALVINGS = 40
DROWNED = 1e6  # requests: more than ever may miss

Misses = Mapping[int, NDArray[np.float64]]  # by the number of replicas: in each window


def joined(parts: Sequence[Misses], most: int) -> Misses:
    """The misses of all parts, for 1 to `most` replicas. Fewer than were tried drown, and more miss
    nothing.
    """

    def of(part: Misses, count: int) -> NDArray[np.float64]:
        windows = len(next(iter(part.values())))
        return part.get(count, np.full(windows, DROWNED if count < min(part) else 0.0))

    return {
        count: np.concatenate([of(part, count) for part in parts]) for count in range(1, most + 1)
    }


def timetable(misses: Misses, allowed: float, warm_up_s: float) -> list[tuple[float, int]]:
    """The cheapest numbers with which at most `allowed` requests miss: (from which second, number),
    one for each window.
    """
    low, high = 0.0, 1e6
    best = _cheapest(misses, high, warm_up_s)
    for _ in range(HALVINGS):
        price = (low + high) / 2 if low else high / 4
        found = _cheapest(misses, price, warm_up_s)
        if _missed(misses, found) <= allowed:
            best, high = found, price
        else:
            low = max(price, 1e-9)
    return [(n * WINDOW_S, count) for n, count in enumerate(best)]


def _missed(misses: Misses, counts: Sequence[int]) -> float:
    return sum(float(misses[count][n]) for n, count in enumerate(counts))


def _cheapest(misses: Misses, price_s: float, warm_up_s: float) -> list[int]:
    """The numbers, one for each window, of least cost, where a miss costs `price_s`."""
    counts = sorted(misses)
    columns = np.array([misses[count] for count in counts])
    paid = WINDOW_S * np.array(counts, dtype=float)
    added = np.maximum(np.subtract.outer(counts, counts).T, 0) * warm_up_s  # [before, after]
    cost = paid + price_s * columns[:, 0]
    choices = []
    for n in range(1, columns.shape[1]):
        through = cost[:, None] + added
        choices.append(through.argmin(axis=0))
        cost = through.min(axis=0) + paid + price_s * columns[:, n]
    at = int(cost.argmin())
    places = [at]
    for choice in reversed(choices):
        at = int(choice[at])
        places.append(at)
    return [counts[place] for place in reversed(places)]
