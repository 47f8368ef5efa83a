"""Tests of simulated workers that die: nothing is lost, and the rest of the fleet takes over."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment, Outage
from loadgen.simulator.latency import LATENCIES
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.errors import ConfigError
from shared.policy import registry
from shared.rules.tiers import DEMO_3
from tests.loadgen.planned import drawn

PROFILE = "a100-llama3-8b"


def run(
    planned: Sequence[PlannedRequest],
    outages: Sequence[Outage],
    policy: str = "slackline",
    latency: str = "none",
    replicas: int = 4,
) -> SimulationResult:
    deployment = Deployment(policy, PROFILE, replicas, latency=LATENCIES[latency], outages=outages)
    options = RunOptions(keep_times=True, check_every=1000)
    return simulate(Traffic(planned, DEMO_3, seed=3), deployment, options)


def check_nothing_is_lost(planned: Sequence[PlannedRequest], result: SimulationResult) -> None:
    assert result.token_unix_s is not None
    for request, verdict, times in zip(planned, result.verdicts, result.token_unix_s, strict=True):
        assert verdict is not None
        assert verdict.output_tokens == len(times) == request.output_tokens
        assert all(before <= after for before, after in pairwise(times))


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    policy=st.sampled_from(("slackline", "qoserve", "slos_serve", "vllm")),
    latency=st.sampled_from(("none", "live")),
    outages=st.lists(
        st.builds(
            Outage, replica=st.just(0), from_s=st.floats(0.0, 2.0), for_s=st.floats(0.05, 2.0)
        ),
        max_size=1,
    ),
    other=st.floats(4.5, 7.0),
)
def test_every_request_ends_once_with_all_its_tokens_whoever_dies(
    seed: int, policy: str, latency: str, outages: list[Outage], other: float
) -> None:
    planned = drawn("mix", 4.0, 8.0, seed)
    outages = [*outages, Outage(1, other), Outage(0, other + 0.3, 2.0)]
    check_nothing_is_lost(planned, run(planned, outages, policy, latency, replicas=3))


def test_what_ran_on_the_dead_replica_goes_on_elsewhere_with_its_tokens() -> None:
    planned = drawn("mix", 8.0, 20.0, seed=1)
    whole = run(planned, [])
    broken = run(planned, [Outage(0, 10.0)])
    check_nothing_is_lost(planned, broken)
    assert whole.moved == 0
    assert broken.moved > 0
    assert sum(v is not None and v.attempts > 1 for v in broken.verdicts) >= broken.moved
    assert broken.met_fraction < whole.met_fraction + 1e-9


def test_the_only_replica_comes_back_and_serves_what_waited() -> None:
    planned = drawn("mix", 1.0, 20.0, seed=2)
    result = run(planned, [Outage(0, 5.0, 30.0)], replicas=1)
    check_nothing_is_lost(planned, result)
    assert result.token_unix_s is not None
    assert not any(5.0 < at_s < 35.0 for times in result.token_unix_s for at_s in times)


def test_a_run_with_a_death_is_the_same_again() -> None:
    planned = drawn("mix", 6.0, 10.0, seed=3)
    first, second = (run(planned, [Outage(1, 4.0, 3.0)], latency="live") for _ in range(2))
    assert first.token_unix_s == second.token_unix_s
    assert first.verdicts == second.verdicts


@pytest.mark.parametrize(
    "outage", [Outage(4, 1.0), Outage(-1, 1.0), Outage(0, -1.0), Outage(0, 1.0, 0.0)]
)
def test_an_outage_of_no_replica_or_no_time_is_an_error(outage: Outage) -> None:
    with pytest.raises(ConfigError, match="no such replica"):
        run(drawn("mix", 1.0, 2.0, seed=1), [outage])


def test_a_replica_that_is_dead_does_not_die_again() -> None:
    with pytest.raises(ConfigError, match="dead already"):
        run(drawn("mix", 1.0, 2.0, seed=1), [Outage(1, 5.0), Outage(1, 2.0, 4.0)])


@pytest.mark.slow
def test_every_policy_survives_a_death() -> None:
    planned = drawn("mix", 4.0, 6.0, seed=4)
    for policy in registry.names():
        check_nothing_is_lost(planned, run(planned, [Outage(0, 3.0, 2.0)], policy, replicas=2))
