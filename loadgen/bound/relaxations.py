"""The bounds of one instance, from the loosest: `alone`, `work`, `memory`, `pace`. docs/bound.md says what each leaves out."""

import numpy as np

from loadgen.bound.instance import Instance
from loadgen.bound.prices import Quote, search
from loadgen.bound.shares import Floats, shared_steps

CHOICES = 5  # of the seconds that an iteration collects, evenly from the least to the most
ROUNDS, LAST_ROUNDS = 30, 120  # of the search for prices: for a choice, and for the best one
TURNS = 3  # of prices and shares, each found for the other


def met_by_relaxation(instance: Instance) -> dict[str, float]:
    """How many requests each relaxation lets be satisfied."""
    count, free = len(instance.work.steps), instance.unbounded
    met_by = {"alone": float(count + free)}
    if not count:
        return met_by
    least_s, most_s = instance.iteration_range_s
    choices = np.linspace(least_s, most_s, CHOICES).tolist() if most_s > least_s else [least_s]
    work = search(instance.market(least_s, np.zeros(count)), _first_prices(instance, least_s), LAST_ROUNDS)
    memory = [search(instance.market(choice, None), work.prices, ROUNDS).bound for choice in choices]
    found = {"work": work.bound, "memory": min(memory)}
    if len(instance.payers.of):
        found["pace"] = _pace(instance, choices, work)
    # None of them says more than that each may be met alone.
    return met_by | {name: min(bound, count) + free for name, bound in found.items()}


def _pace(instance: Instance, choices: list[float], start: Quote) -> float:
    """Choose what an iteration collects, and while somebody's pace matters let those pay whom it costs most."""
    tried = [_turns(instance, choice, start, np.zeros(len(start.gain)), 2, ROUNDS) for choice in choices]
    best = min(range(len(choices)), key=lambda n: tried[n][0].bound)
    return _turns(instance, choices[best], *tried[best], TURNS, LAST_ROUNDS)[0].bound


def _turns(instance: Instance, iteration_s: float, found: Quote, shared: Floats, turns: int, rounds: int) -> tuple[Quote, Floats]:
    best, best_shared = found, shared
    for _ in range(turns):
        # Who pays so much already that it gains nothing is not to pay more. All payers' steps lie in the rush.
        price_s = np.where(np.isfinite(found.step_prices[0]), found.step_prices[0], 0.0) * iteration_s
        worth = np.maximum(found.gain + price_s * shared, 0.0) / np.maximum(price_s, 1e-300)
        shared = shared_steps(instance.work, instance.payers, np.minimum(worth, instance.work.steps))
        found = search(instance.market(iteration_s, shared), found.prices, rounds)
        if found.bound < best.bound:
            best, best_shared = found, shared
    return best, best_shared


def _first_prices(instance: Instance, iteration_s: float) -> Floats:
    """Dearest while requests arrive, then falling; at a level that the largest requests can hardly pay."""
    last_s = float(instance.work.arrival_s.max())
    late = np.clip((instance.middles_s - last_s) / max(1e-9, float(instance.middles_s[-1]) - last_s), 0.0, 1.0)
    market = instance.market(iteration_s, np.zeros(len(instance.work.steps)))
    whole_s = market.prompts.seconds + market.steps[0].seconds
    fits = float(np.clip(instance.capacity_s.sum() / max(float(whole_s.sum()), 1e-300), 0.05, 0.95))
    prices: Floats = (1.0 - 0.95 * late) / max(float(np.quantile(whole_s, fits)), 1e-9)
    return prices
