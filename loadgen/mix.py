"""The plan of a run: who asks for how much, when, of which tier. The same for the same seed, whoever serves it."""

from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple

from loadgen.workload import LengthSource
from shared.tiers import TierSet

IMPORTANT = 10.0  # a paying caller weighs as much as ten others


class PlannedRequest(NamedTuple):
    number: int  # 0, 1, ... in order of arrival
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tier: str
    importance: float
    tenant: str
    application: str


def plan_requests(
    arrivals_s: Sequence[float], lengths: LengthSource, tiers: TierSet, seed: int, tenants: int = 1, important: float = 0.0
) -> list[PlannedRequest]:
    """One planned request per arrival. `important` is the fraction whose importance is ten times its tier's.

    Each request draws from a generator of its own, (seed, index), so that changing one says nothing about another.
    """
    names = list(tiers.tiers)
    shares = list(accumulate(tier.share for tier in tiers.tiers.values()))
    plan = []
    for index, arrival_s in enumerate(arrivals_s):
        rng = Random(f"{seed}/{index}")
        rank = rng.choices(range(len(names)), cum_weights=shares)[0]
        weight = IMPORTANT if rng.random() < important else 1.0
        tenant = f"tenant-{rng.randrange(tenants)}" if tenants > 1 else "default"
        prompt, output, application = lengths.draw(index, rank, rng)
        importance = weight * tiers.tiers[names[rank]].importance
        plan.append(PlannedRequest(index, arrival_s, prompt, output, names[rank], importance, tenant, application))
    return plan
