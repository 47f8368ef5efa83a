"""Tests of the simulator's leaps: iterations that are alike are computed together, with the result
that single ones give.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.latency import Latency
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.policy import registry
from shared.policy.seam import Choice, Policy, View
from shared.rules.tiers import DEMO_3, QOSERVE_3, TierSet
from tests.loadgen import planned
from tests.rings import slow_but

PROFILE = "a100-llama3-8b"
# More slots than there are requests: each check of the table looks at every slot, and the simulator
# has 16,384 where nothing is said.
ROOMY = ReplicaFacts(max_slots=256)
# KV runs short: preemptions, and leaps that must stop before it does
TIGHT = ReplicaFacts(kv_blocks=1100, max_slots=24)
POLICIES = slow_but(["edf", "adaserve"], registry.names())


def both(
    requests: list[PlannedRequest],
    policy: str,
    facts: ReplicaFacts = ROOMY,
    replicas: int = 1,
    tiers: TierSet = DEMO_3,
) -> tuple[SimulationResult, SimulationResult]:
    """These requests, run with leaps and without."""
    return tuple(  # type: ignore[return-value]
        simulate(
            Traffic(requests, tiers),
            Deployment(policy, PROFILE, replicas, facts=facts),
            RunOptions(keep_times=True, check_every=25, leaps=leaps),
        )
        for leaps in (True, False)
    )


drawn = partial(planned.drawn, important=0.3)


@pytest.mark.parametrize(
    ("workload", "facts"), [("azure-conv", ROOMY), ("sharegpt", TIGHT)], ids=["roomy", "tight"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_leapt_run_has_the_same_tokens_at_the_same_instants(
    policy: str, workload: str, facts: ReplicaFacts
) -> None:
    requests = drawn(workload, 1.5, 20.0, seed=11)
    leapt, stepped = both(requests, policy, facts)
    assert leapt.events < stepped.events or leapt.verifications, (
        "nothing was leapt over, and no request speculated"
    )
    assert (leapt.iterations, leapt.tokens, leapt.preempted) == (
        stepped.iterations,
        stepped.tokens,
        stepped.preempted,
    )
    assert leapt.token_unix_s is not None
    assert stepped.token_unix_s is not None
    for ours, theirs in zip(leapt.token_unix_s, stepped.token_unix_s, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert [v and (v.slo_met, v.relegated) for v in leapt.verdicts] == [
        v and (v.slo_met, v.relegated) for v in stepped.verdicts
    ]
    assert leapt.busy_s == pytest.approx(stepped.busy_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_several_replicas_and_overload_leap_to_the_same_attainment(policy: str) -> None:
    requests = drawn("mix", 40.0, 6.0, seed=12, tiers=QOSERVE_3)
    assert len(requests) < ROOMY.max_slots
    leapt, stepped = both(requests, policy, replicas=3, tiers=QOSERVE_3)
    assert [v and (v.slo_met, v.relegated, v.replica) for v in leapt.verdicts] == [
        v and (v.slo_met, v.relegated, v.replica) for v in stepped.verdicts
    ]
    assert leapt.tokens == stepped.tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_a_choice_that_is_used_again_is_the_one_the_policy_would_make(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds also where KV is short, and with two plans in flight, as live."""
    requests = drawn("sharegpt", 1.5, 20.0, seed=11)

    def run(latency: Latency) -> SimulationResult:
        return simulate(
            Traffic(requests, DEMO_3),
            Deployment(policy, PROFILE, latency=latency, facts=TIGHT),
            RunOptions(keep_times=True),
        )

    reused = [run(latency) for latency in (Latency.none(), Latency.live())]
    make = registry.make
    monkeypatch.setattr(registry, "make", lambda name, settings=None: Asked(make(name, settings)))
    for latency, ours in zip((Latency.none(), Latency.live()), reused, strict=True):
        theirs = run(latency)
        assert (ours.iterations, ours.preempted) == (theirs.iterations, theirs.preempted)
        assert ours.token_unix_s is not None
        assert theirs.token_unix_s is not None
        for one, other in zip(ours.token_unix_s, theirs.token_unix_s, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert policy == "sola" or reused[0].preempted, "KV was never short"


class Asked:
    """A policy that is asked for every iteration."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.declared = policy.name, policy.declared
        self.admit, self.observe = policy.admit, policy.observe

    def plan(self, view: View) -> Sequence[Choice]:
        return [dataclasses.replace(choice, repeats=1) for choice in self._policy.plan(view)]


@pytest.mark.parametrize("policy", ["fcfs", "qoserve"])
def test_iterations_before_the_horizon_count_also_within_a_leap(policy: str) -> None:
    requests = drawn("azure-conv", 2.0, 20.0, seed=14)
    leapt, stepped = (
        simulate(
            Traffic(requests, DEMO_3),
            Deployment(policy, PROFILE),
            RunOptions(keep_times=True, horizon_s=18.0, leaps=leaps),
        )
        for leaps in (True, False)
    )
    assert None in leapt.verdicts
    assert (leapt.iterations, leapt.tokens, leapt.simulated_s) == (
        stepped.iterations,
        stepped.tokens,
        stepped.simulated_s,
    )
    assert leapt.busy_s == pytest.approx(stepped.busy_s)


def test_one_long_answer_alone_is_one_leap() -> None:
    requests = [planned.one(0, 200, 1000, "batch")]
    leapt, stepped = both(requests, "fcfs")
    assert leapt.iterations == stepped.iterations == 1000
    assert leapt.events < 40 < 1000 < stepped.events  # mostly the alarm for overdue acks


def test_a_run_at_too_high_a_rate_stops_early() -> None:
    requests = drawn("mix", 12.0, 60.0, seed=13)

    def run(most_missed: int | None) -> SimulationResult:
        return simulate(
            Traffic(requests, DEMO_3),
            Deployment("fcfs", PROFILE),
            RunOptions(most_missed=most_missed),
        )

    whole, early = run(None), run(10)
    missed = sum(v is None or not v.slo_met for v in whole.verdicts)
    assert missed > 10
    assert early.stopped
    assert not whole.stopped
    assert early.iterations < whole.iterations
    assert not run(missed).stopped
