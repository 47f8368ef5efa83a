"""Searches for the prices of a replica's time, cell by cell, that give the least bound (limit.py).

Any prices give a bound (docs/bound.md, 5); the search only makes it tight. The search descends a
smoothed dual, and judges by the true one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.bound.windows import Windows

Floats = NDArray[np.float64]
RATE, FINE_RATE = 0.08, 0.002  # of the steps of the logarithm of a price, at first and in the end
STEEPEST = 1e3  # the greatest slope, relative to the mean: all requests may ask for one cell
# how much dearer a cell may be and still be used, relative to the dearest
SOFT, FINE_SOFT = 0.05, 0.003


@dataclass(frozen=True, slots=True, eq=False)
class Wares:
    """Work to be bought at any time in its window; `seconds` runs along the requests."""

    windows: Windows
    seconds: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """The replicas' seconds per cell, and the work that requests buy: their prompts, and their
    steps in any one of the given ways.

    `credit_s` are the seconds that requests may get back, at the dearest price.
    """

    capacity_s: Floats
    prompts: Wares
    steps: tuple[Wares, ...]
    credit_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Quote:
    """The consequence of some prices: at most `bound` of the requests can be satisfied. `gain` is
    1 less the payment of each request.
    """

    bound: float
    prices: Floats
    gain: Floats
    step_prices: tuple[Floats, ...]  # the cheapest of each way, inf where its window is empty


def quote(market: Market, prices: Floats) -> Quote:
    """The true dual at these prices, which are not negative."""
    step_prices = tuple(way.windows.least(prices) for way in market.steps)
    steps = np.min(
        [_cost(price, way) for price, way in zip(step_prices, market.steps, strict=True)], axis=0
    )
    prompts = _cost(market.prompts.windows.least(prices), market.prompts)
    gain = 1.0 - prompts - steps + float(prices.max()) * market.credit_s
    return Quote(
        float(prices @ market.capacity_s + np.maximum(gain, 0.0).sum()), prices, gain, step_prices
    )


def _cost(price: Floats, wares: Wares) -> Floats:
    """The cost of these wares; inf where there is no time to buy."""
    return np.where(np.isinf(price), np.inf, np.where(np.isinf(price), 1.0, price) * wares.seconds)


def search(market: Market, prices: Floats, rounds: int) -> Quote:
    """The best quote on the way down from `prices`, which are above 0."""
    best = quote(market, prices)
    log, speed, scale = np.log(prices), np.zeros(len(prices)), np.zeros(len(prices))
    for n in range(rounds):
        now = quote(market, np.exp(log)) if n else best
        if now.bound < best.bound:
            best = now
        ahead = (1 - n / rounds) ** 2
        soft = FINE_SOFT + (SOFT - FINE_SOFT) * ahead
        slope = (market.capacity_s - _demand(market, now, soft)) * now.prices
        slope = np.clip(
            slope / max(float(market.capacity_s @ now.prices) / len(prices), 1e-300),
            -STEEPEST,
            STEEPEST,
        )
        speed = 0.9 * speed + 0.1 * slope
        scale = 0.99 * scale + 0.01 * slope * slope
        step = speed / (1 - 0.9 ** (n + 1)) / (np.sqrt(scale / (1 - 0.99 ** (n + 1))) + 1e-3)
        log = log - (FINE_RATE + (RATE - FINE_RATE) * ahead) * step
    return best


def _demand(market: Market, now: Quote, soft: float) -> Floats:
    """Per cell, the seconds asked for. A request that nearly gains counts in part, and spreads over
    the cells that are nearly cheapest.
    """
    weight = np.exp(-(now.prices - now.prices.min()) / (soft * max(now.prices.max(), 1e-300)))
    wanted = 0.5 + 0.5 * np.tanh(np.clip(now.gain / soft, -50, 50))
    total = np.zeros(len(weight))
    for ways in ((market.prompts,), market.steps):
        reach = np.sum([way.windows.sum(weight) for way in ways], axis=0)
        for way in ways:
            total += way.windows.spread(wanted * way.seconds / np.maximum(reach, 1e-300))
    demand_s: Floats = total * weight
    return demand_s
