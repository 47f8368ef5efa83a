"""The fewest replica-hours in hindsight that keep the objective.

A fleet of each number serves the work of each second as a fluid, so many seconds of it a second as
a replica does while it is full: a request that comes while the backlog is longer than its TTFT
misses. Whole answers that are due within the day come at their mean rate until they are due; others
wait for spare time. A dynamic program then picks a number for each minute: its seconds are paid,
and the warm-up of each replica that is added. A price for each miss is searched, so that as many
miss as may. The timetable is served by simulation, and the fluid's speed is searched at which the
objective is just kept. It is near the optimum, and no proof of a lower bound.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.load.mix import PlannedRequest
from shared.policy.slackline.prices import Prices
from shared.rules.tiers import TierSet

WINDOW_S = 60.0
HALVINGS = 40

Misses = Mapping[int, NDArray[np.float64]]  # by the number of replicas: in each window


def fluid(
    requests: Sequence[PlannedRequest], tiers: TierSet, prices: Prices, speed: float, most: int
) -> Misses:
    """The misses with 1 to `most` replicas, each of which does `speed` seconds of work a second."""
    end_s = int(requests[-1].arrival_s) + 1
    even = np.zeros(end_s)  # work of whole answers
    come: list[list[tuple[float, float]]] = [[] for _ in range(end_s)]  # TTFT and work of others
    for request in requests:
        slo, second = tiers.named(request.tier).slo, int(request.arrival_s)
        prompt, output = np.array(request.prompt_tokens), request.output_tokens
        work_s = float(prices.prefill_s(prompt, np.array(0)))
        work_s += output * float(prices.decoding_s(prompt + output / 2))
        if slo.ttft_s is not None:
            come[second].append((slo.ttft_s, work_s))
        elif slo.ttlt_s is not None and slo.ttlt_s < end_s:
            even[second : second + int(slo.ttlt_s)] += work_s / slo.ttlt_s
    misses = {count: np.zeros(-(-end_s // int(WINDOW_S))) for count in range(1, most + 1)}
    for count, missed in misses.items():
        backlog_s, each_s = 0.0, count * speed
        for second, others in enumerate(come):
            backlog_s = max(0.0, backlog_s + float(even[second]) - each_s)
            for ttft_s, work_s in others:
                if backlog_s > ttft_s * each_s:
                    missed[int(second // WINDOW_S)] += 1
                else:
                    backlog_s += work_s
    return misses


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
