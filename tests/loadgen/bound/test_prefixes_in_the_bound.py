"""Tests of the bound where prompts begin alike: shared work counts once, and no run beats it."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.bound.common import common
from loadgen.bound.limit import bound
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared.policy import registry
from shared.prefix import Piece
from shared.rules.tiers import DEMO_3, Tier, TierSet
from shared.vocabulary import Slo
from tests.loadgen.planned import one as asked
from tests.rings import slow_but

QOSERVE = "a100-llama3-8b-qoserve"
ALIKE = ["agent-loops", "rag", "system-prompt", "chat-sessions"]


def begins(request: PlannedRequest, *pieces: Piece, answer: int | None = None) -> PlannedRequest:
    return request._replace(pieces=pieces, answer=answer)


def one_system_prompt(count: int, own_tokens: int = 64) -> list[PlannedRequest]:
    requests = [asked(i, 4096 + own_tokens, 2, "b", 0.01 * i) for i in range(count)]
    return [begins(request, Piece(7, 4096)) for request in requests]


def test_what_the_first_to_come_computes_is_not_counted_again() -> None:
    tiers = TierSet(name="x", default="b", tiers={"b": Tier(slo=Slo(ttft_s=1.5))})
    requests = one_system_prompt(30)
    served = simulate(Traffic(requests, tiers), Deployment("fcfs", QOSERVE, draft=0.0))
    assert served.met_fraction == 1.0
    assert bound(requests, tiers, QOSERVE, 1).met_fraction == 1.0
    unlike = [request._replace(pieces=()) for request in requests]
    assert bound(unlike, tiers, QOSERVE, 1).met_fraction < 0.5


def test_a_shared_prompt_is_not_free_and_is_held_once() -> None:
    tiers = TierSet(name="x", default="b", tiers={"b": Tier(slo=Slo(ttft_s=0.01))})
    # the first to come is late even alone; the others only if what is their own takes too long
    found = bound(one_system_prompt(10, own_tokens=6000), tiers, QOSERVE, 1)
    assert found.met_fraction == 0.0
    slow = TierSet(name="x", default="b", tiers={"b": Tier(slo=Slo(ttft_s=9.0, tbt_s=0.1))})
    many = [request._replace(output_tokens=80) for request in one_system_prompt(100)]
    assert bound(many, slow, QOSERVE, 1, kv_tokens=40_000).met_fraction == 1.0


def test_common_tokens_are_counted_to_the_end_of_the_block_that_differs() -> None:
    first = begins(asked(0, 640, 64, at_s=1.0), Piece(1, 640), answer=2)
    later = begins(asked(1, 1000, 9, at_s=2.0), Piece(1, 640), Piece(2, 64), Piece(3, 296))
    sooner = begins(asked(2, 300, 9, at_s=0.0), Piece(1, 256), Piece(9, 44))
    alone = asked(3, 300, 9, at_s=3.0)
    found = common([first, later, sooner, alone])
    assert found.earlier.tolist() == [256 + 63, 704 + 63, 63, 0]
    assert found.anywhere.tolist() == [704 + 63, 704 + 63, 256 + 63, 0]
    assert not common([alone, asked(4, 300, 9)]).some


@pytest.mark.parametrize("policy", slow_but(["fcfs", "slackline"], registry.names()))
@pytest.mark.parametrize("workload", slow_but(["agent-loops"], ALIKE))
def test_no_run_under_overload_beats_it(workload: str, policy: str) -> None:
    arrivals = [0.12 * n for n in range(60)]
    requests = plan_requests(arrivals, named_workload(workload, 8192), DEMO_3, 3)
    facts = ReplicaFacts(kv_blocks=4000)
    deployment = Deployment(policy, QOSERVE, facts=facts, draft=0.0)
    met = simulate(Traffic(requests, DEMO_3), deployment).met_fraction
    assert met <= bound(requests, DEMO_3, QOSERVE, 1, kv_tokens=64_000).met_fraction


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_no_policy_ever_satisfies_more_requests_that_begin_alike(seed: int) -> None:
    rng = Random(seed)
    slos = [
        Slo(ttft_s=rng.uniform(0.05, 1), tbt_s=rng.uniform(0.01, 0.06)),
        Slo(ttlt_s=rng.uniform(0.2, 3)),
    ]
    both = {"a": Tier(slo=slos[0]), "b": Tier(slo=slos[1])}
    tiers = TierSet(name="drawn", default="a", tiers=both)
    requests = []
    for i, at_s in enumerate(sorted(rng.uniform(0, 2) for _ in range(rng.randint(2, 40)))):
        pieces = [
            Piece(rng.randint(1, 3), rng.choice([100, 640, 3000])) for _ in range(rng.randint(0, 3))
        ]
        prompt = sum(n for _, n in pieces) + rng.randint(1, 400)
        request = asked(i, prompt, rng.randint(1, 60), rng.choice("ab"), at_s)
        requests.append(begins(request, *pieces, answer=rng.choice([None, 3, 50 + i])))
    replicas, kv_tokens = rng.choice([1, 1, 2]), rng.choice([20_000, 400_000])
    deployment = Deployment(
        rng.choice(registry.names()),
        QOSERVE,
        replicas,
        facts=ReplicaFacts(kv_blocks=kv_tokens // 16, context_tokens=16_384),
        draft=0.0,
    )
    met = simulate(Traffic(requests, tiers, seed), deployment).met_fraction
    assert met <= bound(requests, tiers, QOSERVE, replicas, kv_tokens).met_fraction + 1e-9
