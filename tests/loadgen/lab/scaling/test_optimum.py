"""Tests of the optimum in hindsight, against all timetables of a small day."""

from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

from loadgen.lab.scaling.days import TIERS
from loadgen.lab.scaling.optimum import WINDOW_S, fluid, timetable
from shared.perf.profile_file import load
from shared.policy.slackline.prices import prices_of
from tests.loadgen.planned import one

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


PRICES = prices_of(load("a100-llama3-70b-tp4"))


def test_in_a_fluid_what_comes_behind_more_than_its_ttft_misses() -> None:
    """Forty prompts of half a second each at once: a replica of full speed does six of them within
    3 s, and the one under way is in time.
    """
    second = float(PRICES.prefill_s(np.array(3000), np.array(0)))
    burst = [one(n, 3000, 1, "interactive", 90.0) for n in range(40)]
    misses = fluid([*burst, one(40, 1, 1, "chat", 150.0)], TIERS, PRICES, 1.0, 9)
    assert misses[1].tolist() == [0.0, pytest.approx(40 - 3.0 / second, abs=1.0), 0.0]
    assert [misses[n].sum() for n in range(1, 9)] == sorted(
        (misses[n].sum() for n in range(1, 9)), reverse=True
    )
    assert not misses[9].any()


def test_in_a_fluid_whole_answers_take_their_share_until_they_are_due() -> None:
    """Batches due tomorrow take none."""

    def missed(tier: str) -> float:
        people = [one(n, 3000, 1, "chat", 0.8 * n) for n in range(1200)]
        others = [one(1200 + n, 3000, 1, tier, 100.0) for n in range(1200)]
        in_order = sorted([*people, *others], key=lambda request: request.arrival_s)
        return float(fluid(in_order, TIERS, PRICES, 1.0, 1)[1].sum())

    assert missed("batch") == 0.0
    assert missed("summary") > 0.0
