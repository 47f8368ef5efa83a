"""Tests of Ascendra's pools in the simulator: low-priority replicas (LP) offload late requests to
high-priority ones (HP), which take more once nothing waits there.
"""

from collections.abc import Mapping, Sequence

import pytest

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.latency import LATENCIES, Latency
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.rules.tiers import load_tiers
from shared.vocabulary import FinishReason
from tests.rings import slow_but

PAPER = load_tiers("ascendra-8b-sharegpt")


ROOMY, TIGHT = ReplicaFacts(), ReplicaFacts(kv_blocks=1200, max_slots=24)


def drawn(
    rate: float, duration_s: float, seed: int = 1, workload: str = "sharegpt"
) -> list[PlannedRequest]:
    return plan_requests(
        draw_arrivals(Gaps(), rate, duration_s, seed, ((1.0, 1.0),)),
        named_workload(workload, 8192),
        PAPER,
        seed,
    )


def run(
    requests: Sequence[PlannedRequest],
    policy: str = "ascendra",
    replicas: int = 3,
    *,
    settings: Mapping[str, str] | None = None,
    latency: Latency = LATENCIES["none"],
    facts: ReplicaFacts = ROOMY,
    options: RunOptions | None = None,
) -> SimulationResult:
    deployment = Deployment(policy, "a100-llama3-8b", replicas, settings or {}, latency, facts)
    return simulate(Traffic(requests, PAPER), deployment, options)


@pytest.mark.parametrize(
    ("name", "facts"), slow_but([("none", TIGHT)], [("none", TIGHT), ("live", ROOMY)])
)
def test_two_lp_and_one_hp_end_every_request_once_and_offload_under_load(
    name: str, facts: ReplicaFacts
) -> None:
    requests = drawn(15.0, 8.0)
    result = run(
        requests,
        latency=LATENCIES[name],
        facts=facts,
        options=RunOptions(keep_times=True, check_every=29),
    )
    assert [v is not None and v.finish_reason for v in result.verdicts] == [
        FinishReason.STOP
    ] * len(requests)
    assert [v and v.output_tokens for v in result.verdicts] == [r.output_tokens for r in requests]
    assert result.offloaded > 0
    served = {v.replica for v in result.verdicts if v is not None}
    assert served == {"r01", "r02", "r03"}


def test_at_low_load_nobody_is_offloaded_and_the_ticket_keeps_hp_busy() -> None:
    requests = drawn(1.5, 40.0, workload="short-mix")
    result = run(requests)
    assert result.offloaded == 0
    assert result.relegated == 0
    assert sum(v is not None and v.replica == "r02" for v in result.verdicts) > len(requests) / 2
    without = run(requests, settings={"tickets": "false"})
    assert not any(v is not None and v.replica == "r02" for v in without.verdicts)


@pytest.mark.parametrize(
    ("policy", "settings", "dropping"),
    [
        pytest.param("ascendra", {}, {"overload": "drop"}, marks=pytest.mark.slow),
        ("vllm", {"mode": "prefill_first"}, {"drop_late": "true"}),
        ("fcfs", {"chunk_tokens": "512"}, {"drop_late": "true"}),
    ],
)
def test_dropping_ends_the_late_ones_and_serves_more_in_time(
    policy: str, settings: dict[str, str], dropping: dict[str, str]
) -> None:
    """Figure 12, in kind; section 8.6 compares with baselines that drop."""
    requests = drawn(16.0, 20.0, seed=2)
    kept = run(requests, policy, settings=settings)
    dropped = run(requests, policy, settings=settings | dropping)
    reasons = [v.finish_reason for v in dropped.verdicts if v is not None]
    assert set(reasons) == {FinishReason.STOP, FinishReason.DROPPED}
    assert len(reasons) == len(requests)
    assert dropped.met_fraction > kept.met_fraction
