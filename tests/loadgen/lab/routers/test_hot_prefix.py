"""Tests that a prefix too hot for one replica spreads, simulated."""

from collections.abc import Callable
from random import Random

import pytest

from loadgen.lab.routers.peers import ROUTERS
from loadgen.lab.routers.runs import CHAT, PROFILE
from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.prefix import Piece
from shared.routing.pipeline import Router

HOT, DOCUMENTS = 0, 30
SECONDS, HOT_RPS, OTHERS_RPS = 12.0, 24.0, 6.0


def requests(seed: int) -> list[PlannedRequest]:
    """Questions to one document that everybody reads, and to others that few do."""
    rng, drawn = Random(seed), []
    for rate_rps, documents in ((HOT_RPS, [HOT]), (OTHERS_RPS, range(1, DOCUMENTS + 1))):
        arrival_s = rng.expovariate(rate_rps)
        while arrival_s < SECONDS:
            drawn.append((arrival_s, Piece(rng.choice(documents), 6000)))
            arrival_s += rng.expovariate(rate_rps)
    return [
        PlannedRequest(
            number=n,
            arrival_s=arrival_s,
            prompt_tokens=6200,
            output_tokens=100,
            tier="chat",
            importance=1.0,
            tenant="t",
            application="",
            pieces=(piece,),
        )
        for n, (arrival_s, piece) in enumerate(sorted(drawn))
    ]


def served(
    router: Callable[[], Router], asked: list[PlannedRequest], replicas: int = 4
) -> SimulationResult:
    facts = ReplicaFacts(kv_blocks=200_000 // 16, context_tokens=8192)
    deployment = Deployment("slackline", PROFILE, replicas, draft=0.0, facts=facts, router=router)
    return simulate(Traffic(asked, CHAT), deployment)


def found(result: SimulationResult, asked: list[PlannedRequest], *, hot: bool) -> float:
    """The part of these requests whose document was found."""
    cached = [
        verdict is not None and verdict.cached_tokens > 5000
        for verdict, request in zip(result.verdicts, asked, strict=True)
        if (request.pieces[0].id == HOT) is hot
    ]
    return sum(cached) / len(cached)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_prefix_too_hot_for_one_replica_runs_on_several_and_others_still_find_theirs(
    seed: int,
) -> None:
    asked = requests(seed)
    ours, least = (served(ROUTERS[name], asked) for name in ("ours", "least load"))
    hot = [request for request in asked if request.pieces[0].id == HOT]
    assert served(ROUTERS["ours"], hot, 1).met_fraction < 0.7, "one replica could serve it"
    places = [
        verdict.replica
        for verdict, request in zip(ours.verdicts, asked, strict=True)
        if verdict is not None and request.pieces[0].id == HOT
    ]
    shares = sorted(places.count(place) / len(places) for place in set(places))
    assert shares[-1] < 0.5, "it runs on several"
    assert ours.met_fraction >= least.met_fraction
    assert found(ours, asked, hot=True) > 0.95
    assert found(ours, asked, hot=False) > found(least, asked, hot=False) + 0.1
