"""Makes the requests of loads that Hypothesis draws, for tests of whole runs on a few A100s."""

from typing import Any

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from shared.rules.tiers import TierSet

# Requests a second that one A100 carries, roughly.
CARRIED_RPS = {"chatbot": 10.0, "coder": 5.0, "mix": 4.5, "sharegpt": 3.0}

Load = dict[str, Any]  # has `times` (its rate over the carried one), `burstiness`, `seed`, and more


def requests_of(
    workload: str, load: Load, tiers: TierSet, count: int, replicas: int = 1
) -> list[PlannedRequest]:
    """About `count` requests of the workload, which arrive as the load says."""
    rate_rps = CARRIED_RPS[workload] * replicas * load["times"]
    arrivals_s = draw_arrivals(Gaps(load["burstiness"]), rate_rps, count / rate_rps, load["seed"])
    return plan_requests(arrivals_s, named_workload(workload, 8192), tiers, load["seed"])
