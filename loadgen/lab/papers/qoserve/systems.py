"""The policies of QoServe's experiments, with the settings they had there."""

from collections.abc import Mapping

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run
from shared.rules.tiers import TierSet

ROUND_ROBIN = {"router": "round_robin"}  # section 4.1.1
# Section 3.6: alpha is 8 ms a token where the rate does not change, and follows the load where it
# does.
FIXED_ALPHA = {"alpha_low_s": "0.008", "alpha_high_s": "0.008"}
POLICIES: Mapping[str, Mapping[str, str]] = {
    "fcfs": ROUND_ROBIN,
    "edf": ROUND_ROBIN,
    "srpf": ROUND_ROBIN,
    "qoserve": {**ROUND_ROBIN, **FIXED_ALPHA},
}
LABELS = {
    "fcfs": "Sarathi-FCFS",
    "edf": "Sarathi-EDF",
    "srpf": "Sarathi-SRPF",
    "qoserve": "QoServe",
}


def run(policy: str, workload: str, rate_rps: float, duration_s: float, **more: str) -> Run:
    """A run of a policy. `more` has settings beyond those above."""
    return Run(
        policy=policy,
        settings={**POLICIES[policy], **more},
        workload=workload,
        rate_rps=rate_rps,
        duration_s=duration_s,
    )


def with_shares(tiers: TierSet, name: str, shares: Mapping[str, float]) -> TierSet:
    """The same tiers with other shares of the requests."""
    return replace(
        tiers,
        name=name,
        tiers={key: replace(tier, share=shares[key]) for key, tier in tiers.tiers.items()},
    )
