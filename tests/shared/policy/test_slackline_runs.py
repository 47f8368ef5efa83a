"""Slackline: whole runs, simulated."""

import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, example, given, note, settings
from hypothesis import strategies as st

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import CHATBOT, Synthetic
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.latency import LATENCIES
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.policy.slackline.policy import Part
from shared.schemas import Verdict
from shared.tiers import DEMO_3, Tier, TierSet
from shared.vocabulary import Definition, Missed, Slo
from tests.shared.policy.drawn_loads import CARRIED_RPS, Load, requests_of

CHAT = TierSet(
    name="chat",
    default="chat",
    tiers={"chat": Tier(slo=Slo(ttft_s=0.8, tbt_s=0.1, definition=Definition.MAX_TPOT_10))},
)


def planned(tiers: TierSet, rate_rps: float, seed: int) -> list[PlannedRequest]:
    arrivals_s = draw_arrivals(Gaps(), rate_rps, 25.0, seed)
    return plan_requests(arrivals_s, Synthetic((CHATBOT,), 8192), tiers, seed=seed)


def served(
    policy: str,
    tiers: TierSet,
    rate_rps: float,
    *,
    latency: str = "none",
    draft: float = 0.0,
    replicas: int = 1,
    seed: int = 3,
) -> SimulationResult:
    return simulate(
        Traffic(planned(tiers, rate_rps, seed), tiers, seed=seed),
        Deployment(policy, "a100-llama3-8b", replicas, latency=LATENCIES[latency], draft=draft),
        RunOptions(check_every=50),
    )


@pytest.mark.parametrize("latency", ["none", "live"])
def test_in_overload_those_taken_keep_their_slo_and_no_other_policy_keeps_more(
    latency: str,
) -> None:
    result = served("slackline", CHAT, 11.0, latency=latency)
    kept = [verdict for verdict in result.verdicts if verdict and not verdict.relegated]
    assert sum(not verdict.slo_met for verdict in kept) <= 0.02 * len(result.verdicts)
    for policy in ("fcfs", "qoserve", "slos_serve"):
        other = served(policy, CHAT, 11.0, latency=latency)
        assert result.met_fraction >= other.met_fraction - 0.02


tight = st.builds(
    Slo, ttft_s=st.sampled_from((0.3, 0.6, 1.2, 2.4, 6.0)), tbt_s=st.floats(0.03, 0.12)
)
whole = st.builds(Slo, ttlt_s=st.sampled_from((15.0, 30.0, 60.0)))
loads = st.fixed_dictionaries(
    {
        "workload": st.sampled_from(sorted(CARRIED_RPS)),
        "definition": st.sampled_from(
            (Definition.DEADLINE, Definition.MAX_TPOT_10, Definition.MEAN_TPOT)
        ),
        "times": st.sampled_from((0.7, 1.0, 1.4, 2.0)),
        "burstiness": st.sampled_from((1.0, 3.0)),
        "seed": st.integers(0, 999),
    }
)
# `RUNS=100 pytest tests/shared/policy/test_slackline_runs.py` tries so many loads.
searched = settings(
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("RUNS", "4")),
    phases=[Phase.explicit, Phase.generate],  # to make an example smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)


def outcomes(load: Load, requests: Sequence[PlannedRequest], tiers: TierSet) -> Sequence[Verdict]:
    traffic = Traffic(requests, tiers.judged_by(load["definition"]), load["seed"])
    result = simulate(
        traffic, Deployment("slackline", "a100-llama3-8b"), RunOptions(check_every=50)
    )
    found = [verdict for verdict in result.verdicts if verdict is not None]
    assert len(found) == len(requests)
    return found


@searched
@given(load=loads, slos=st.lists(tight, min_size=1, max_size=3))
@example(
    load={
        "workload": "chatbot",
        "definition": Definition.MAX_TPOT_10,
        "times": 2.0,
        "burstiness": 1.0,
        "seed": 0,
    },
    slos=[Slo(ttft_s=0.5, tbt_s=0.05), Slo(ttft_s=0.8, tbt_s=0.1)],
)
def test_with_exact_predictions_no_token_of_those_taken_is_late(
    load: Load, slos: list[Slo]
) -> None:
    """Up to three paces, and up to twice the requests that can be served."""
    tiers = TierSet(
        name="paces", default="t0", tiers={f"t{n}": Tier(slo=slo) for n, slo in enumerate(slos)}
    )
    verdicts = outcomes(load, requests_of(load["workload"], load, tiers, 200), tiers)
    kept = [verdict for verdict in verdicts if not verdict.relegated]
    assert len(kept) > len(verdicts) / 10
    late = sum(verdict.missed is Missed.TBT for verdict in kept)
    note(f"{load}, {slos}: {late} of {len(kept)}")
    assert not late


# Of two that decode together and end about when they must, either may be late.
LUCK = 3


@searched
@given(
    load=loads,
    slos=st.lists(st.one_of(tight, whole), min_size=1, max_size=2),
    importance=st.sampled_from((2.0, 4.0, 10.0)),
)
@example(
    load={
        "workload": "sharegpt",
        "definition": Definition.MEAN_TPOT,
        "times": 1.4,
        "burstiness": 1.0,
        "seed": 1,
    },
    slos=[Slo(ttlt_s=15.0)],
    importance=2.0,
)
def test_of_two_alike_the_more_important_is_never_the_one_that_is_lost(
    load: Load, slos: list[Slo], importance: float
) -> None:
    """Each request comes twice at once, and one of the two is more important. A few may be lost
    by luck.
    """
    names = [f"t{n}" for n in range(len(slos))]
    tiers = TierSet(
        name="twins",
        default="t0",
        tiers={
            **{name: Tier(slo=slo) for name, slo in zip(names, slos, strict=True)},
            **{
                f"{name}-more": Tier(slo=slo, importance=importance, share=0.0)
                for name, slo in zip(names, slos, strict=True)
            },
        },
    )
    requests: list[PlannedRequest] = []
    half = {**load, "times": load["times"] / 2}
    for one in requests_of(load["workload"], half, tiers, 120):
        pair = [one, one._replace(tier=f"{one.tier}-more")]
        for each in pair if one.number % 2 else reversed(pair):
            requests.append(each._replace(number=len(requests)))
    lost = {"less": 0, "more": 0, "more alone": 0}
    verdicts = outcomes(load, requests, tiers)
    for n in range(0, len(requests), 2):
        more, less = sorted((n, n + 1), key=lambda k: not requests[k].tier.endswith("-more"))
        lost["less"] += not verdicts[less].slo_met
        lost["more"] += not verdicts[more].slo_met
        lost["more alone"] += verdicts[less].slo_met and not verdicts[more].slo_met
    note(f"{load}, {slos}, {importance}: {lost} of {len(requests) // 2} pairs")
    assert lost["more alone"] <= LUCK
    assert lost["more"] <= lost["less"] + LUCK


def test_a_request_that_nobody_could_serve_in_time_holds_no_best_effort_request_back() -> None:
    """Three answers run, and a request comes whose TTFT has passed: it ends within two seconds."""
    tiers = TierSet(
        name="two",
        default="usual",
        tiers={
            "usual": Tier(slo=Slo(ttft_s=2.0, tbt_s=0.06)),
            "late": Tier(slo=Slo(ttft_s=0.0001, tbt_s=1.0)),
        },
    )
    usual = [PlannedRequest(n, 0.0, 100, 3000, "usual", 1.0, "", "question") for n in range(3)]
    late = PlannedRequest(3, 5.0, 100, 50, "late", 1.0, "", "question")
    deployment = Deployment("slackline", "a100-llama3-8b")
    result = simulate(Traffic([*usual, late], tiers, 1), deployment, RunOptions(keep_times=True))
    assert [verdict.relegated for verdict in result.verdicts if verdict] == 3 * [False] + [True]
    assert result.token_unix_s is not None
    ends = [times[-1] - result.token_unix_s[0][0] for times in result.token_unix_s]
    assert ends[3] < 7.0 < min(ends[:3])


@pytest.mark.parametrize("draft", [0.0, 0.05])
def test_every_request_ends_in_overload(draft: float) -> None:
    result = served("slackline", DEMO_3, 16.0, draft=draft)
    assert all(verdict is not None for verdict in result.verdicts)
    assert result.finished == len(result.verdicts)


def test_more_replicas_lose_no_more_requests_in_the_mean_over_seeds() -> None:
    seeds = range(4)
    met = [
        sum(served("slackline", CHAT, 24.0, replicas=n, seed=seed).met_fraction for seed in seeds)
        for n in (1, 2, 3)
    ]
    assert met == sorted(met), f"seeds {seeds}: {met}"


@pytest.mark.parametrize("seed", range(3))
def test_in_overload_hardly_an_important_request_is_lost(seed: int) -> None:
    """Importance alone is less than capacity; with the others there is half as much again."""
    tiers = TierSet(
        name="two",
        default="low",
        tiers={
            "high": Tier(slo=Slo(ttft_s=0.8, tbt_s=0.1), share=0.3, importance=20.0),
            "low": Tier(slo=Slo(ttft_s=0.8, tbt_s=0.1), share=0.7),
        },
    )
    result = served("slackline", tiers, 16.0, seed=seed)
    lost: dict[str, list[bool]] = {"high": [], "low": []}
    for request, verdict in zip(planned(tiers, 16.0, seed), result.verdicts, strict=True):
        lost[request.tier].append(verdict is None or not verdict.slo_met)
    share = {tier: sum(each) / len(each) for tier, each in lost.items()}
    assert share["high"] <= 0.03 and share["low"] > 0.1, f"seed {seed}: {share}"


@pytest.mark.parametrize("part", Part)
def test_without_any_of_its_parts_every_request_ends(part: Part) -> None:
    requests = planned(DEMO_3, 12.0, 5)
    deployment = Deployment("slackline", "a100-llama3-8b", settings={"without": part.value})
    result = simulate(Traffic(requests, DEMO_3, seed=5), deployment, RunOptions(check_every=50))
    assert result.finished == len(result.verdicts)
