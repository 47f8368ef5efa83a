"""Tests of the lead, the time by which a plan leaves before the iteration under way ends: the
engine waits for plans for no more than its share, and the lead is no longer than that takes.
"""

from random import Random

import pytest

from shared.core.replica.learning import IDLE_SHARE, Lead

SEED, FIRST_S, MAX_S, WAY_S = 3, 0.004, 0.030, 0.002


def after(
    lead: Lead, iterations: int, exec_s: float, error_s: float, rng: Random
) -> tuple[float, float]:
    """The engine's share of waiting and the mean lead, where the ends of iterations have an error
    of standard deviation `error_s`.
    """
    waited_s = leads_s = 0.0
    for _ in range(iterations):
        idle_s = max(0.0, WAY_S - lead.seconds + rng.gauss(0.0, error_s))
        lead.observe(idle_s, exec_s)
        waited_s, leads_s = waited_s + idle_s, leads_s + lead.seconds
    return waited_s / (iterations * exec_s), leads_s / iterations


@pytest.mark.parametrize("exec_s", [0.008, 0.04, 0.2])
@pytest.mark.parametrize("error", [0.02, 0.1], ids=lambda error: f"ends within {error:.0%}")
def test_the_engine_waits_for_no_more_than_its_share(exec_s: float, error: float) -> None:
    lead, rng = Lead(FIRST_S, MAX_S), Random(SEED)
    after(lead, 1000, exec_s, error * exec_s, rng)
    waits, mean_s = after(lead, 4000, exec_s, error * exec_s, rng)
    print(f"seed {SEED}: waits {waits:.3%}, lead {1000 * mean_s:.1f} ms")
    assert waits <= 1.2 * IDLE_SHARE or mean_s > 0.8 * MAX_S, "longer leads were allowed"
    assert waits >= 0.5 * IDLE_SHARE or mean_s < 1.25 * FIRST_S, "a shorter lead would have done"
