"""Tests of the simulator: it repeats for a seed, loses no request or token, is exact where the
answer is known, and tells a good policy from a bad one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest

from loadgen.load.mix import PlannedRequest
from loadgen.load.tally import Tally
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.latency import LATENCIES, Latency
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.timeline import Alarm, Timeline
from loadgen.simulator.traffic import Traffic
from loadgen.trials.figures import figures_of
from loadgen.trials.trial import Trial
from shared.errors import ConfigError
from shared.perf import profile_file as store
from shared.perf import zero_load
from shared.policy import registry
from shared.rules.tiers import DEMO_3, QOSERVE_3, TierSet
from shared.vocabulary import FinishReason
from tests.loadgen.planned import drawn, one
from tests.rings import slow_but

PROFILE = "a100-llama3-8b"
ROOMY = ReplicaFacts()
KEPT = RunOptions(keep_times=True)


mixed = partial(drawn, "mix", important=0.2)


def run(
    requests: Sequence[PlannedRequest],
    policy: str,
    latency: Latency = LATENCIES["live"],
    *,
    replicas: int = 1,
    settings: Mapping[str, str] | None = None,
    tiers: TierSet = DEMO_3,
    facts: ReplicaFacts = ROOMY,
    options: RunOptions | None = None,
) -> SimulationResult:
    deployment = Deployment(policy, PROFILE, replicas, settings or {}, latency, facts)
    return simulate(Traffic(requests, tiers, seed=3), deployment, options)


def trial(policy: str) -> Trial:
    deployment = Deployment(policy, PROFILE, latency=Latency.live())
    return Trial(deployment=deployment, tiers=DEMO_3, duration_s=20.0, seed=3)


@pytest.mark.parametrize("policy", slow_but(["fcfs", "slackline"], registry.names()))
@pytest.mark.parametrize("latency", LATENCIES)
def test_the_same_arguments_give_the_same_result_to_the_last_digit(
    policy: str, latency: str
) -> None:
    requests = mixed(6.0, 8.0)
    first, second = (
        run(requests, policy, LATENCIES[latency], replicas=2, options=KEPT) for _ in range(2)
    )
    assert replace(first, wall_s=0.0) == replace(second, wall_s=0.0)


@pytest.mark.parametrize("policy", registry.names())
def test_every_request_ends_once_with_exactly_its_tokens_and_the_books_balance(policy: str) -> None:
    requests = mixed(8.0, 10.0)
    result = run(
        requests,
        policy,
        replicas=2,
        facts=ReplicaFacts(kv_blocks=2000, max_slots=24),
        options=RunOptions(keep_times=True, check_every=7),
    )
    assert [v is not None and v.finish_reason for v in result.verdicts] == [
        FinishReason.STOP
    ] * len(requests)
    assert [v and v.output_tokens for v in result.verdicts] == [r.output_tokens for r in requests]
    assert result.token_unix_s is not None
    assert [len(times) for times in result.token_unix_s] == [r.output_tokens for r in requests]
    assert all(
        list(times) == sorted(times) and times[0] > r.arrival_s
        for times, r in zip(result.token_unix_s, requests, strict=True)
    )
    assert result.tokens == sum(r.output_tokens for r in requests)


@pytest.mark.parametrize("name", LATENCIES)
@pytest.mark.parametrize("policy", ["fcfs", "edf"])
def test_alone_a_request_takes_its_zero_load_time_and_the_stated_latencies(
    policy: str, name: str
) -> None:
    latency = LATENCIES[name].at_medians()
    profile = store.load(PROFILE)
    requests = [one(n, 1 + 397 * n, 1 + 7 * n, "Q1", 30.0 * n) for n in range(15)]
    result = run(requests, policy, latency, tiers=QOSERVE_3, settings={"chunk_tokens": "512"})
    assert result.met_fraction == 1.0
    for request, verdict in zip(requests, result.verdicts, strict=True):
        assert verdict is not None
        alone_s = zero_load.ttft_s(profile, request.prompt_tokens, 512)
        assert verdict.ttft_s == pytest.approx(alone_s + latency.first_plan_s, abs=1e-6)
        between_s = zero_load.tbt_s(profile, request.prompt_tokens, request.output_tokens)
        if verdict.mean_tpot_s is not None:
            assert verdict.mean_tpot_s == pytest.approx(between_s, rel=0.01, abs=1e-6)
    assert result.idle_s == pytest.approx(0.0, abs=0.02), "a plan came late on an idle machine"


def test_under_overload_qoserve_meets_more_slos_than_fcfs_on_the_same_arrivals() -> None:
    requests = mixed(7.0, 40.0, bursts="demo")
    ours = run(requests, "qoserve")
    for chunk in ("256", "512"):
        theirs = run(requests, "fcfs", settings={"chunk_tokens": chunk})
        assert ours.met_fraction > theirs.met_fraction + 0.05
    assert ours.relegated > 0


def test_a_second_replica_helps_and_both_are_used() -> None:
    requests = mixed(6.0, 15.0)
    alone, both = run(requests, "qoserve", replicas=1), run(requests, "qoserve", replicas=2)
    assert both.met_fraction >= alone.met_fraction
    assert {v.replica for v in both.verdicts if v is not None} == {"r01", "r02"}


def test_a_horizon_leaves_requests_without_a_verdict_and_they_count_as_missed() -> None:
    requests = mixed(7.0, 20.0)
    result = run(requests, "fcfs", options=RunOptions(keep_times=True, horizon_s=15.0))
    assert len(result.verdicts) < len(requests) or None in result.verdicts
    until = RunOptions(keep_times=True, horizon_s=requests[-1].arrival_s)
    whole = run(requests, "fcfs", options=until)
    found = figures_of(trial("fcfs"), requests, whole)
    assert found.offered == len(requests) > found.finished
    assert found.violated == len(requests) - sum(
        v is not None and v.slo_met for v in whole.verdicts
    )


def tally(requests: Sequence[PlannedRequest], result: SimulationResult, tiers: TierSet) -> Tally:
    """The run as `slackline load` would count it, with clients that have no network delay."""
    times = result.token_unix_s
    assert times is not None
    made = Tally(tiers)
    for planned, verdict, token_unix_s in zip(requests, result.verdicts, times, strict=True):
        outcome = made.begin(planned, planned.arrival_s, 0.0)
        for at_unix_s in token_unix_s:
            outcome.emit(1, at_unix_s)
        if verdict is None:
            outcome.end("unfinished")
        else:
            outcome.server_met, outcome.relegated = verdict.slo_met, verdict.relegated
            outcome.end(verdict.finish_reason, verdict.message)
    return made


def test_the_client_would_count_what_the_verdicts_say() -> None:
    requests = mixed(7.0, 20.0, bursts="demo")
    result = run(requests, "qoserve", options=KEPT)
    outcomes = tally(requests, result, DEMO_3).outcomes
    assert [o.met for o in outcomes] == [v is not None and v.slo_met for v in result.verdicts]
    found = figures_of(trial("qoserve"), requests, result)
    assert sum(group.offered for group in found.by_tier.values()) == found.offered == len(requests)
    assert found.violated_fraction == pytest.approx(1 - result.met_fraction)


def test_a_request_that_no_replica_can_hold_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="prompt of 9000 tokens"):
        run([one(0, 9000, 5, "interactive")], "fcfs")


def test_calls_of_one_instant_run_in_order_and_an_alarm_rings_at_its_present_wish() -> None:
    line, heard = Timeline(), list[tuple[float, str]]()
    wish: list[float | None] = [5.0]
    alarm = Alarm(
        line,
        lambda: wish[0],
        lambda: (heard.append((line.now_s, "ring")), wish.__setitem__(0, None))[0],
    )
    alarm.reset()
    wish[0] = 7.0
    alarm.reset()
    for name in "abc":
        line.at(3.0, lambda name=name: heard.append((line.now_s, name)))
    while line.next_s < float("inf"):
        line.step()
    assert heard == [(3.0, "a"), (3.0, "b"), (3.0, "c"), (7.0, "ring")]
