"""Computes four bounds on the requests met: `alone`, `work`, `memory`, `pace` (docs/bound.md)."""

import numpy as np

from loadgen.bound.instance import Instance
from loadgen.bound.prices import Market, Quote, quote, search
from loadgen.bound.shares import Floats, shared_steps

CHOICES = 5  # of the seconds that an iteration collects, evenly from the least to the most
ROUNDS, LAST_ROUNDS = 30, 120  # of the search for prices: for a choice, and for the best one
# of the level of prices to start the search from
MULTIPLES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
TURNS = 3  # of prices and shares, each found for the other


def met_by_relaxation(instance: Instance) -> dict[str, float]:
    """The number of requests that each relaxation allows to be satisfied."""
    count, free = len(instance.work.steps), instance.unbounded
    met_by = {"alone": float(count + free)}
    if not count:
        return met_by
    least_s, most_s = instance.iteration_range_s
    choices = np.linspace(least_s, most_s, CHOICES).tolist() if most_s > least_s else [least_s]
    market = instance.market(least_s, np.zeros(count))
    work = search(market, _falling(instance, market), LAST_ROUNDS)
    memory = _memory(instance, choices, work.prices)
    found = {"work": work.bound, "memory": memory.bound}
    if len(instance.payers.of):
        # Prices for memory are a second place to start from, if memory excludes a request that work
        # does not.
        found["pace"] = _pace(
            instance, choices, [work, memory] if memory.bound < min(work.bound, count) else [work]
        )
    # No relaxation allows more requests than may be met each alone.
    return met_by | {name: min(bound, count) + free for name, bound in found.items()}


def _memory(instance: Instance, choices: list[float], known: Floats) -> Quote:
    """Choose the seconds that an iteration collects from the contexts that it reads.

    The search starts from the known prices, and also from the best of even and falling ones at
    several levels: where the KV binds and work does not, prices found for work are of no use.
    """
    tried = []
    for choice in choices:
        market = instance.market(choice, None)
        falling = _falling(instance, market)
        shapes = known, np.full(len(known), falling.max()), falling
        fresh = min(
            (quote(market, multiple * shape) for shape in shapes for multiple in MULTIPLES),
            key=lambda one: one.bound,
        )
        tried += [(search(market, prices, ROUNDS), market) for prices in (known, fresh.prices)]
    best, market = min(tried, key=lambda one: one[0].bound)
    return search(market, best.prices, LAST_ROUNDS)


def _pace(instance: Instance, choices: list[float], known: list[Quote]) -> float:
    """Choose the seconds that an iteration collects. While the pace of a request matters, the
    requests pay that the pace costs most.
    """
    none_shared = np.zeros(len(instance.work.steps))
    tried = []
    for choice in choices:
        market = instance.market(choice, none_shared)
        tried += [
            (choice, _turns(instance, choice, quote(market, one.prices), none_shared, 2, ROUNDS))
            for one in known
        ]
    choice, best = min(tried, key=lambda one: one[1][0].bound)
    return _turns(instance, choice, *best, TURNS, LAST_ROUNDS)[0].bound


def _turns(
    instance: Instance, iteration_s: float, found: Quote, shared: Floats, turns: int, rounds: int
) -> tuple[Quote, Floats]:
    best, best_shared = found, shared
    for _ in range(turns):
        # A request that already pays so much that it gains nothing does not pay more. The steps of
        # all payers lie in the rush.
        price_s = (
            np.where(np.isfinite(found.step_prices[0]), found.step_prices[0], 0.0) * iteration_s
        )
        worth = np.maximum(found.gain + price_s * shared, 0.0) / np.maximum(price_s, 1e-300)
        shared = shared_steps(
            instance.work, instance.payers, np.minimum(worth, instance.work.steps)
        )
        found = search(instance.market(iteration_s, shared), found.prices, rounds)
        if found.bound < best.bound:
            best, best_shared = found, shared
    return best, best_shared


def _falling(instance: Instance, market: Market) -> Floats:
    """Prices that fall after the arrivals, at a level that the largest can hardly pay."""
    last_s = float(instance.work.arrival_s.max())
    late = np.clip(
        (instance.middles_s - last_s) / max(1e-9, float(instance.middles_s[-1]) - last_s), 0.0, 1.0
    )
    whole_s = market.prompts.seconds + market.steps[0].seconds
    fits = float(np.clip(instance.capacity_s.sum() / max(float(whole_s.sum()), 1e-300), 0.05, 0.95))
    prices: Floats = (1.0 - 0.95 * late) / max(float(np.quantile(whole_s, fits)), 1e-9)
    return prices
