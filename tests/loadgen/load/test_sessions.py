"""Tests of sessions (rounds of requests that follow one another, as in tool loops): when a round is
sent, simulated and live, and when a whole session counts as met.
"""

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.bound.limit import bound
from loadgen.load.lengths.laws import Lengths
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.session import rounds, sessions
from loadgen.load.workload import REASONING, TOOLLLM, named_workload
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.latency import LATENCIES, Latency
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from loadgen.trials.figures import figures_of
from loadgen.trials.trial import Trial
from shared.core.admission.admission import AdmissionSettings
from shared.policy import registry
from shared.routing.pipeline import Router
from shared.rules.tiers import Tier, TierSet, load_tiers
from shared.schemas import Digest, Offer
from shared.vocabulary import FinishReason, ReplicaId, Slo
from tests.loadgen import planned
from tests.loadgen.load.test_send import one, over_nats

PROFILE = "a100-llama3-8b"
PATIENT = TierSet(
    name="patient",
    default="a",
    tiers={"a": Tier(slo=Slo(ttlt_s=60.0)), "b": Tier(slo=Slo(ttlt_s=0.5))},
)
TRIAL = Trial(deployment=Deployment("fcfs", PROFILE), tiers=PATIENT, duration_s=1.0, seed=1)


def turn(
    number: int,
    after: int | None,
    *,
    output: int = 10,
    pause_s: float = 0.0,
    tier: str = "a",
    arrival_s: float = 0.0,
) -> PlannedRequest:
    asked = planned.one(number, 200, output, tier, arrival_s)
    return asked._replace(session="s", after=after, pause_s=pause_s)


def run(
    requests: list[PlannedRequest],
    latency: Latency = LATENCIES["none"],
    admission: AdmissionSettings | None = None,
    most_missed: int | None = None,
) -> SimulationResult:
    deployment = Deployment("fcfs", PROFILE, latency=latency, admission=admission)
    options = RunOptions(keep_times=True, most_missed=most_missed)
    return simulate(Traffic(requests, PATIENT), deployment, options)


# ---------------------------------------------------------------- in a simulation


@pytest.mark.parametrize(
    "latency", [Latency.none(), Latency.live().at_medians()], ids=["none", "live"]
)
def test_a_round_comes_when_the_one_before_it_has_ended_and_its_pause_is_over(
    latency: Latency,
) -> None:
    result = run(
        [turn(0, None), turn(1, 0, pause_s=3.0), turn(2, 1), turn(3, None, arrival_s=0.5)], latency
    )
    arrived_s, ended_s = [], []
    for verdict in result.verdicts:
        assert verdict is not None
        assert verdict.ttlt_s is not None
        ended_s.append(verdict.ended_unix_s)
        arrived_s.append(verdict.ended_unix_s - verdict.ttlt_s)
    end_s = latency.ack.median_s + latency.over.median_s  # from a last token until its client knows
    expected_s = [0.0, ended_s[0] + end_s + 3.0, ended_s[1] + end_s, 0.5]
    assert arrived_s == pytest.approx(expected_s, abs=0.005)


def test_a_simulated_offer_names_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    named, router = [], registry.router

    def watched(policy: str, settings: Mapping[str, str] | None = None) -> Router:
        inner = router(policy, settings)

        def order(
            offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random
        ) -> Sequence[ReplicaId]:
            named.append((offer.key, offer.session))
            return inner(offer, digests, rng)

        return order

    monkeypatch.setattr(registry, "router", watched)
    run([turn(0, None), turn(1, 0), turn(2, None, arrival_s=50.0)._replace(session="")])
    assert named == [("default.0", "s"), ("default.1", "s"), ("default.2", "")]


def test_after_a_round_that_failed_none_is_sent_and_the_run_ends() -> None:
    plan = [turn(0, None, output=200), turn(1, None), turn(2, 1), turn(3, 2)]
    result = run(plan, admission=AdmissionSettings(open_limit=0))
    reasons = [None if verdict is None else verdict.finish_reason for verdict in result.verdicts]
    assert reasons == [FinishReason.REFUSED, FinishReason.REFUSED, None, None]
    found = figures_of(TRIAL, plan, result)
    assert (found.offered, found.violated) == (4, 4)


def test_rounds_that_are_never_sent_stop_a_run_that_may_miss_no_more() -> None:
    plan = [turn(0, None), turn(1, 0), turn(2, 1), turn(3, None, arrival_s=50.0)]
    assert run(plan, admission=AdmissionSettings(open_limit=0), most_missed=2).stopped
    assert not run(plan, admission=AdmissionSettings(open_limit=0), most_missed=4).stopped


def test_a_session_meets_its_slo_if_each_of_its_rounds_does() -> None:
    plan = [
        turn(0, None),
        turn(1, 0, output=200, tier="b"),
        turn(2, None),
        turn(3, 2),
        turn(4, None, tier="b", output=200),
    ]
    result = run(plan)
    assert [v and v.slo_met for v in result.verdicts] == [True, False, True, True, False]
    found = figures_of(TRIAL, plan, result).by_session
    assert found is not None
    assert (found.offered, found.violated, found.violated_fraction) == (3, 2, pytest.approx(2 / 3))


def test_without_rounds_no_sessions_are_reported() -> None:
    plan = [turn(0, None), turn(1, None)]
    assert sessions(plan, np.array([True, False])) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_sessions_are_counted_by_their_rounds(lengths: list[int], data: st.DataObject) -> None:
    plan, broken = [], []
    for length in lengths:
        for n in range(length):
            plan.append(turn(len(plan), len(plan) - 1 if n else None))
            broken.append(data.draw(st.booleans()))
    by_session = np.split(np.array(broken), np.cumsum(lengths)[:-1])
    found = sessions(plan, np.array(broken))
    assert [len(session) for session in rounds(plan)] == lengths
    if max(lengths) > 1:
        assert found is not None
        assert (found.offered, found.violated) == (
            len(lengths),
            sum(bool(session.any()) for session in by_session),
        )


def test_the_bound_counts_later_rounds_as_met_since_it_cannot_know_their_arrival() -> None:
    hopeless = TierSet(name="hopeless", default="a", tiers={"a": Tier(slo=Slo(ttlt_s=0.0001))})
    plan = [turn(0, None), turn(1, 0), turn(2, 1), turn(3, None)]
    assert bound(plan, hopeless, PROFILE, 1).met_fraction == 0.5


# ---------------------------------------------------------------- live


def test_the_load_client_sends_a_round_when_it_has_read_the_end_of_the_one_before() -> None:
    first, second, third = one(0, "interactive"), one(1, "interactive"), one(2, "interactive")
    plan = [
        first,
        second._replace(arrival_s=0.0, after=0, pause_s=2.0, session="s"),
        third._replace(arrival_s=0.0, after=1, session="s"),
    ]
    tally, server = over_nats(plan, ttft_s=0.5, tbt_s=0.05)
    sent_s = [outcome.sent_unix_s - tally.outcomes[0].sent_unix_s for outcome in tally.outcomes]
    assert sent_s == pytest.approx([0.0, 0.95 + 2.0, 0.95 + 2.0 + 0.95], abs=0.05)
    assert [request.session for request in server.requests] == ["", "s", "s"]
    assert all(outcome.met for outcome in tally.outcomes)


def test_the_load_client_gives_up_a_session_with_the_round_that_fails() -> None:
    refused, later = one(0, "batch"), one(1, "batch")._replace(after=0)
    tally, _ = over_nats([refused, later, one(2, "interactive")], ttft_s=0.5, tbt_s=0.05)
    assert [(outcome.planned.number, outcome.ended) for outcome in tally.outcomes] == [
        (0, "refused"),
        (2, "stop"),
    ]


# ---------------------------------------------------------------- workloads


def close(tokens: list[int], mean: float, p99: float, deviation: float) -> None:
    assert np.mean(tokens) == pytest.approx(mean, rel=0.03)
    assert np.percentile(tokens, 99) == pytest.approx(p99, rel=0.05)
    assert np.std(tokens) == pytest.approx(deviation, rel=0.05)


def test_reasoning_and_tool_loops_are_those_of_slos_serves_table_4() -> None:
    rng = Random(3)
    thoughts = [REASONING.draw(rng, 100_000) for _ in range(20_000)]
    close([each.prompt_tokens for each in thoughts], 127, 421, 83)
    close([each.thinking_tokens for each in thoughts], 4693, 7297, 1442)
    close([each.output_tokens - each.thinking_tokens for each in thoughts], 803, 1650, 280)
    loops = [TOOLLLM.draw(rng, 100_000) for _ in range(10_000)]
    pairs: list[Lengths] = [each for first in loops for each in (first, *first.then)]
    close([each.prompt_tokens for each in pairs], 690, 2131, 356)
    close([each.output_tokens for each in pairs], 116, 363, 66)
    count = [1 + len(first.then) for first in loops]
    assert (np.mean(count), np.std(count)) == (
        pytest.approx(2.7, abs=0.05),
        pytest.approx(1.1, abs=0.05),
    )


def test_a_plan_numbers_rounds_in_order_and_gives_the_last_one_the_tier_of_answers() -> None:
    tiers = load_tiers("slos-serve-toolllm")
    plan = plan_requests([0.5 * n for n in range(300)], named_workload("toolllm", 8192), tiers, 4)
    assert [request.number for request in plan] == list(range(len(plan)))
    whole = rounds(plan)
    assert len(whole) == 300 < len(plan)
    for n, session in enumerate(whole):
        assert [request.tier for request in session] == ["tool-call"] * (len(session) - 1) + [
            "answer"
        ]
        assert {request.arrival_s for request in session} == {0.5 * n}
        assert [request.after for request in session] == [
            None,
            *(request.number for request in session[:-1]),
        ]


def test_stages_of_reasoning_and_tool_loops_are_tight_where_slos_serves_table_1_says() -> None:
    reasoning, tools = (
        load_tiers("slos-serve-reasoning").tiers,
        load_tiers("slos-serve-toolllm").tiers,
    )
    assert reasoning["reasoning"].slo == Slo(ttft_x=3, thinking_tbt_s=0.05, tbt_s=0.1)
    assert (tools["tool-call"].slo, tools["answer"].slo) == (
        Slo(ttft_x=3, tbt_s=0.05),
        Slo(ttft_x=3, tbt_s=0.1),
    )
