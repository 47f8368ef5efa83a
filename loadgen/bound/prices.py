"""The prices of time: the least bound that can be found by changing what a second of the replicas costs, cell by cell.

Any prices give a bound (docs/bound.md, 5); the search only makes it good. It descends a smoothed dual, and judges by the true one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.bound.windows import Windows

Floats = NDArray[np.float64]
RATE, FINE_RATE = 0.08, 0.002  # of the steps of the logarithm of a price, at first and in the end
STEEPEST = 1e3  # of the slope, relative to the mean: all requests may ask for one cell
SOFT, FINE_SOFT = 0.05, 0.003  # how much dearer a cell may be and still be used, relative to the dearest


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """A run of cells with charges of its own. Windows outside it are empty; seconds along the requests."""

    first_cell: int
    last_cell: int
    prompts: Windows
    steps: Windows
    prompt_s: Floats
    steps_s: Floats
    credit_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """The replicas' seconds per cell, and the phases in order of time, which together cover all cells."""

    capacity_s: Floats
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Quote:
    """What these prices say: at most `bound` of the requests can be satisfied; `gain` is 1 less what each would pay."""

    bound: float
    prices: Floats
    gain: Floats
    prompt_price: tuple[Floats, ...]  # the cheapest in each phase, inf where there is none
    step_price: tuple[Floats, ...]


def quote(market: Market, prices: Floats) -> Quote:
    """The true dual at these prices, which are not negative."""
    prompt_price = tuple(phase.prompts.least(prices) for phase in market.phases)
    step_price = tuple(phase.steps.least(prices) for phase in market.phases)
    prompt = np.min([_times(p, phase.prompt_s) for p, phase in zip(prompt_price, market.phases, strict=True)], axis=0)
    dearest = prices.max(initial=0.0)
    steps = np.min(
        [_times(p, phase.steps_s) - dearest * phase.credit_s for p, phase in zip(step_price, market.phases, strict=True)], axis=0
    )
    gain = 1.0 - prompt - steps
    return Quote(float(prices @ market.capacity_s + np.maximum(gain, 0.0).sum()), prices, gain, prompt_price, step_price)


def _times(price: Floats, seconds: Floats) -> Floats:
    """inf where there is no cell to buy in, whatever is bought."""
    return np.where(np.isinf(price), np.inf, np.where(np.isinf(price), 1.0, price) * seconds)


def search(market: Market, prices: Floats, rounds: int) -> Quote:
    """The best quote met on the way down from `prices`, which are above 0."""
    best = quote(market, prices)
    log, speed, scale = np.log(prices), np.zeros(len(prices)), np.zeros(len(prices))
    dearness = _dearness(market)
    for n in range(rounds):
        now = quote(market, np.exp(log)) if n else best
        if now.bound < best.bound:
            best = now
        ahead = (1 - n / rounds) ** 2
        soft = FINE_SOFT + (SOFT - FINE_SOFT) * ahead
        slope = (market.capacity_s - _demand(market, now, dearness, soft)) * now.prices
        slope = np.clip(slope / max(float(market.capacity_s @ now.prices) / len(prices), 1e-300), -STEEPEST, STEEPEST)
        speed = 0.9 * speed + 0.1 * slope
        scale = 0.99 * scale + 0.01 * slope * slope
        step = speed / (1 - 0.9 ** (n + 1)) / (np.sqrt(scale / (1 - 0.99 ** (n + 1))) + 1e-3)
        log = log - (FINE_RATE + (RATE - FINE_RATE) * ahead) * step
    return best


def _dearness(market: Market) -> Floats:
    """Per cell, what the same work costs in its phase, relative to the first."""
    made = np.ones(len(market.capacity_s))
    whole_s = [float((phase.prompt_s + phase.steps_s).sum()) for phase in market.phases]
    for phase, seconds in zip(market.phases, whole_s, strict=True):
        made[phase.first_cell : phase.last_cell + 1] = seconds / max(whole_s[0], 1e-300)
    return made


def _demand(market: Market, now: Quote, dearness: Floats, soft: float) -> Floats:
    """Per cell, the seconds asked for, if requests that nearly gain are nearly there and spread over cells that are nearly cheapest."""
    cost = now.prices * dearness
    weight = np.exp(-(cost - cost.min()) / (soft * max(cost.max(), 1e-300)))
    wanted = 0.5 + 0.5 * np.tanh(np.clip(now.gain / soft, -50, 50))
    total = np.zeros(len(cost))
    for windows, seconds in (
        ([p.prompts for p in market.phases], [p.prompt_s for p in market.phases]),
        ([p.steps for p in market.phases], [p.steps_s for p in market.phases]),
    ):
        reach = np.sum([w.sum(weight) for w in windows], axis=0)
        for w, s in zip(windows, seconds, strict=True):
            total += w.spread(wanted * s / np.maximum(reach, 1e-300))
    demand_s: Floats = total * weight
    return demand_s
