"""Short answers with paces that a flat profile can hardly keep."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import plan_requests
from loadgen.load.workload import Lengths
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.latency import Latency
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.draft import DraftCost
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo
from tests.shared.policy.flat_profile import flat_profile


class Short:
    """Prompts of 20 tokens and answers of 48 to 144."""

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        return Lengths(20, rng.randint(48, 144), "question")


def serve(
    policy: str,
    folder: Path,
    paces_s: Sequence[float],
    rates_per_s: Sequence[float],
    *,
    batch_s: float,
    token_s: float,
    definition: Definition = Definition.MEAN_TPOT,
    seed: int = 1,
    draft: DraftCost = 0.0,
    latency: Latency | None = None,
) -> SimulationResult:
    """Each rate lasts for 10 s; the paces have equal shares. `batch_s`, `token_s`: of the profile,
    a file in `folder`.
    """
    tiers = TierSet(
        name="paces",
        default="p0",
        tiers={
            f"p{n}": Tier(slo=Slo(ttft_s=0.5, tbt_s=pace_s, definition=definition))
            for n, pace_s in enumerate(paces_s)
        },
    )
    steps = [(10.0, rate) for rate in rates_per_s]
    arrivals = draw_arrivals(Gaps(), 1.0, 10.0 * len(steps), seed, steps)
    deployment = Deployment(
        policy,
        flat_profile(folder, batch_s=batch_s, token_s=token_s),
        latency=latency or Latency.none(),
        facts=ReplicaFacts(kv_blocks=8192, context_tokens=4096),
        draft=draft,
    )
    return simulate(Traffic(plan_requests(arrivals, Short(), tiers, seed), tiers, seed), deployment)
