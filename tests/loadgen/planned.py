"""Makes planned requests (their arrival, lengths and tier) for tests of loadgen."""

from loadgen.load.arrivals import Gaps, draw_arrivals, parse_profile
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from shared.rules.tiers import DEMO_3, TierSet


def one(
    number: int, prompt_tokens: int, output_tokens: int, tier: str = "b", at_s: float = 0.0
) -> PlannedRequest:
    """A single request; its tier is `b` where none is named."""
    return PlannedRequest(number, at_s, prompt_tokens, output_tokens, tier, 1.0, "default", "")


def drawn(
    workload: str,
    rate: float,
    duration_s: float,
    seed: int = 1,
    tiers: TierSet = DEMO_3,
    *,
    bursts: str = "",
    important: float = 0.0,
) -> list[PlannedRequest]:
    """The requests of a built-in workload, with Poisson arrivals."""
    shape = parse_profile(bursts, duration_s) if bursts else ((1.0, 1.0),)
    arrivals_s = draw_arrivals(Gaps(), rate, duration_s, seed, shape)
    lengths = named_workload(workload, 8192)
    return plan_requests(arrivals_s, lengths, tiers, seed, important=important)
