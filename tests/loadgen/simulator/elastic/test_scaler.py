"""Tests of simulated fleets that grow and shrink: nothing is lost, each replica's time counts."""

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.elastic.law import Fleet, OurLaw, Scaling
from loadgen.simulator.latency import LATENCIES
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from loadgen.simulator.virtual_fleet import ANNOUNCE_S, STAYS_S
from shared.rules.tiers import DEMO_3
from shared.schemas import Announce, Record
from shared.vocabulary import ReplicaId
from tests.loadgen.planned import drawn

PROFILE = "a100-llama3-8b"


class Erratic:
    """A law that wants any number from one to five, anew each second."""

    every_s = 1.0
    prefill: Sequence[ReplicaId] = ()

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def announced(self, announce: Announce) -> None:
        return

    def arrived(self, record: Record) -> None:
        return

    def ended(self, record: Record) -> None:
        return

    def wanted(self, fleet: Fleet) -> int:
        return self._rng.randint(0, 6)


def run(
    planned: list[PlannedRequest],
    scaling: Scaling,
    latency: str = "none",
    policy: str = "slackline",
) -> SimulationResult:
    deployment = Deployment(
        policy, PROFILE, 2, latency=LATENCIES[latency], draft=0.0, scaling=scaling
    )
    options = RunOptions(keep_times=True, check_every=1000)
    return simulate(Traffic(planned, DEMO_3, seed=3), deployment, options)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    latency=st.sampled_from(("none", "live")),
    policy=st.sampled_from(("slackline", "qoserve", "vllm")),
    warm_up_s=st.sampled_from((0.0, 0.5, 3.0)),
)
def test_every_request_ends_once_with_all_its_tokens_however_replicas_come_and_go(
    seed: int, latency: str, policy: str, warm_up_s: float
) -> None:
    planned = drawn("mix", 4.0, 15.0, seed)
    scaling = Scaling(law=partial(Erratic, seed), least=1, most=5, warm_up_s=warm_up_s)
    result = run(planned, scaling, latency, policy)
    assert result.token_unix_s is not None
    for request, verdict, times in zip(planned, result.verdicts, result.token_unix_s, strict=True):
        assert verdict is not None
        assert verdict.output_tokens == len(times) == request.output_tokens
    assert {count for _, count in result.counts} <= {1, 2, 3, 4, 5}


def test_a_replica_that_leaves_hands_its_requests_on() -> None:
    class One(Erratic):
        def wanted(self, fleet: Fleet) -> int:
            return 1

    planned = drawn("mix", 12.0, 5.0, 1)
    result = run(planned, Scaling(law=partial(One, 0), warm_up_s=0.0))
    assert result.drained > 0
    assert all(verdict is not None and verdict.output_tokens for verdict in result.verdicts)


@pytest.mark.parametrize("rate", [0.01, 8.0])
def test_a_replica_that_leaves_costs_until_it_has_left(rate: float) -> None:
    class One(Erratic):
        def wanted(self, fleet: Fleet) -> int:
            return 1

    planned = drawn("mix", rate, 200.0 if rate < 1 else 10.0, 1)
    result = run(planned, Scaling(law=partial(One, 0), warm_up_s=0.0))
    left_s = result.replica_s - result.simulated_s - 1.0  # it is told to leave after a second
    assert 0.0 <= left_s <= STAYS_S + ANNOUNCE_S
    assert (left_s > 0.0) == (rate > 1)


def test_a_replica_costs_from_the_decision_to_start_it() -> None:
    planned = drawn("mix", 2.0, 20.0, 1)

    class Three(Erratic):
        def wanted(self, fleet: Fleet) -> int:
            return 3

    result = run(planned, Scaling(law=partial(Three, 0), warm_up_s=5.0))
    # of three replicas two serve from the start; the third is asked for after a second
    assert result.counts == [(0.0, 2), (1.0, 3)] or result.counts[1][1] == 3
    begun_s = result.counts[1][0] - result.counts[0][0]
    assert result.replica_s == pytest.approx(3 * result.simulated_s - begun_s)


def test_our_law_grows_with_a_burst_and_shrinks_after_it() -> None:
    quiet, burst = drawn("azure-code", 0.5, 400.0, 1), drawn("azure-code", 12.0, 100.0, 2)
    planned = sorted(
        [*quiet, *(each._replace(arrival_s=each.arrival_s + 100.0) for each in burst)],
        key=lambda each: each.arrival_s,
    )
    planned = [each._replace(number=n) for n, each in enumerate(planned)]
    result = run(planned, Scaling(law=partial(OurLaw, 10.0), warm_up_s=10.0))

    def at(instant_s: float) -> int:
        return [count for from_s, count in result.counts if from_s <= instant_s][-1]

    assert at(90.0) <= 2 < at(190.0)
    assert result.counts[-1][1] < at(190.0)
