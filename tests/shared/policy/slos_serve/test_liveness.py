"""Tests of SLOs-Serve: no request waits for ever, and a late one costs the others nothing."""

from collections.abc import Sequence

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Slo

TIERS = TierSet(
    name="t",
    default="chat",
    tiers={
        "chat": Tier(slo=Slo(ttft_s=2.0, tbt_s=0.05)),
        "soon": Tier(slo=Slo(ttlt_s=6.0)),
        "hopeless": Tier(slo=Slo(ttlt_s=0.1)),
        "some-day": Tier(slo=Slo(ttlt_s=90_000.0)),
    },
)
ROOMY = ReplicaFacts(max_slots=256)  # each check of the table looks at every slot


def planned(number: int, at_s: float, prompt: int, output: int, tier: str) -> PlannedRequest:
    return PlannedRequest(number, at_s, prompt, output, tier, 1.0, "t", tier)


def run(requests: Sequence[PlannedRequest], facts: ReplicaFacts = ROOMY) -> SimulationResult:
    return simulate(
        Traffic(requests, TIERS),
        Deployment("slos_serve", "a100-llama3-8b", facts=facts, draft=0.0),
        RunOptions(check_every=5),
    )


def test_a_begun_best_effort_prefill_gives_way_to_a_standard_prompt_that_lacks_room() -> None:
    facts = ReplicaFacts(kv_blocks=300, context_tokens=4096, max_slots=16)  # 4800 tokens
    # The first is best-effort at once, and has begun when the second comes; the two prompts
    # together are more than the KV.
    result = run(
        [planned(0, 0.0, 3000, 20, "hopeless"), planned(1, 0.2, 3000, 20, "some-day")], facts
    )
    assert [verdict is not None and verdict.output_tokens for verdict in result.verdicts] == [
        20,
        20,
    ]


def test_a_request_that_runs_past_its_ttlt_does_not_keep_others_from_their_prefill() -> None:
    # from these the policy learns how long the outputs of this application are
    short = [planned(n, 0.2 * n, 100, 20, "soon") for n in range(20)]
    # this request is late from second 11 on, and runs until second 20 or so
    long = planned(20, 5.0, 200, 1500, "soon")
    chats = [planned(21 + n, 12.0 + 0.5 * n, 1500, 40, "chat") for n in range(10)]
    result = run([*short, long, *chats])
    late = result.verdicts[20]
    assert late is not None and not late.slo_met
    assert all(verdict is not None and verdict.slo_met for verdict in result.verdicts[21:])
