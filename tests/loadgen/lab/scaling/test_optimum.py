"""Tests of the optimum in hindsight, against all timetables of a small day."""

from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

from loadgen.lab.scaling.optimum import WINDOW_S, timetable

WINDOWS, MOST = 5, 3


def cost_s(counts: tuple[int, ...], warm_up_s: float) -> float:
    added = sum(max(after - before, 0) for before, after in pairwise(counts))
    return WINDOW_S * sum(counts) + warm_up_s * added


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("warm_up_s", [0.0, 30.0, 300.0])
def test_no_timetable_with_as_few_misses_is_cheaper(seed: int, warm_up_s: float) -> None:
    """A price for each miss finds only corners: none is cheaper that misses as little as the one
    that was found.
    """
    rng = Random(seed)
    misses = {
        count: np.array([float(rng.randint(0, 20 // count)) for _ in range(WINDOWS)])
        for count in range(1, MOST + 1)
    }
    misses[MOST] *= 0.0
    allowed = rng.randint(0, 30)

    def missed(counts: tuple[int, ...]) -> float:
        return sum(float(misses[count][n]) for n, count in enumerate(counts))

    table = timetable(misses, allowed, warm_up_s)
    assert [at_s for at_s, _ in table] == [n * WINDOW_S for n in range(WINDOWS)]
    found = tuple(count for _, count in table)
    assert missed(found) <= allowed
    as_good = [
        counts
        for counts in product(range(1, MOST + 1), repeat=WINDOWS)
        if missed(counts) <= missed(found)
    ]
    assert cost_s(found, warm_up_s) <= min(cost_s(each, warm_up_s) for each in as_good) + 1e-6
