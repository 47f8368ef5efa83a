"""Tests of the policy slackline in whole simulated runs: what it takes, it serves in time."""

import os
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, example, given, note, settings
from hypothesis import strategies as st

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import CHATBOT, Synthetic
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.latency import LATENCIES
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.draft import DRAFT
from shared.rules.tiers import DEMO_3, Tier, TierSet
from shared.schemas import Verdict
from shared.vocabulary import Definition, Missed, Slo
from tests.rings import slow_but
from tests.shared.policy.drawn_loads import CARRIED_RPS, Load, requests_of

CHAT = TierSet(
    name="chat",
    default="chat",
    tiers={"chat": Tier(slo=Slo(ttft_s=0.8, tbt_s=0.1, definition=Definition.MAX_TPOT_10))},
)
# More slots than any load here has requests: each check of the table looks at every slot.
ROOMY = ReplicaFacts(max_slots=2048)


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
    seed: int = 3,
) -> SimulationResult:
    return checked(
        Traffic(planned(tiers, rate_rps, seed), tiers, seed=seed),
        Deployment(policy, "a100-llama3-8b", latency=LATENCIES[latency], draft=draft, facts=ROOMY),
    )


def checked(traffic: Traffic, deployment: Deployment) -> SimulationResult:
    assert len(traffic.requests) < deployment.facts.max_slots
    return simulate(traffic, deployment, RunOptions(check_every=50))


@pytest.mark.slow
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


def loads_judged_by(*definitions: Definition) -> st.SearchStrategy[Load]:
    return st.fixed_dictionaries(
        {
            "workload": st.sampled_from(sorted(CARRIED_RPS)),
            "definition": st.sampled_from(definitions),
            "times": st.sampled_from((0.7, 1.0, 1.4, 2.0)),
            "burstiness": st.sampled_from((1.0, 3.0)),
            "seed": st.integers(0, 999),
        }
    )


loads = loads_judged_by(Definition.DEADLINE, Definition.MAX_TPOT_10, Definition.MEAN_TPOT)
loads_of_any = loads_judged_by(*Definition)
# `RUNS=100 pytest tests/shared/policy/slackline/test_runs.py` tries so many loads.
searched = settings(
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("RUNS", "2")),
    phases=[Phase.explicit, Phase.generate],  # to make an example smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)


def outcomes(
    load: Load, requests: Sequence[PlannedRequest], tiers: TierSet, draft: float = 0.0
) -> Sequence[Verdict]:
    traffic = Traffic(requests, tiers.judged_by(load["definition"]), load["seed"])
    deployment = Deployment("slackline", "a100-llama3-8b", facts=ROOMY, draft=draft)
    result = checked(traffic, deployment)
    found = [verdict for verdict in result.verdicts if verdict is not None]
    assert len(found) == len(requests)
    return found


# Of the requests that are taken in a run so many may miss their first token.
LATE_FIRST = 0.03


@searched
@given(
    load=loads,
    slos=st.lists(tight, min_size=1, max_size=3),
    importance=st.sampled_from((1.0, 4.0)),
    draft=st.sampled_from((0.0, DRAFT)),
)
@example(
    load={
        "workload": "chatbot",
        "definition": Definition.MAX_TPOT_10,
        "times": 2.0,
        "burstiness": 1.0,
        "seed": 0,
    },
    slos=[Slo(ttft_s=0.5, tbt_s=0.05), Slo(ttft_s=0.8, tbt_s=0.1)],
    importance=1.0,
    draft=0.0,
)
@example(
    load={
        "workload": "sharegpt",
        "definition": Definition.MEAN_TPOT,
        "times": 1.4,
        "burstiness": 3.0,
        "seed": 7,
    },
    slos=[Slo(ttft_s=0.6, tbt_s=0.04)],
    importance=4.0,
    draft=DRAFT,
)
def test_with_exact_predictions_what_is_taken_is_served_in_time(
    load: Load, slos: list[Slo], importance: float, draft: float
) -> None:
    """A request that is taken, and that does not give way, misses neither its pace nor its end: by
    deadlines, by windows of ten and by the mean. Hardly any misses its first token.

    Up to three paces, one of them more important, and up to twice the requests that can be served,
    with a draft model and without. The paces are those that plain decodes keep: a pace that needs
    drafts is kept by luck.

    *The allowance*: of 78,315 requests that were taken on 441 loads drawn as here, by a script, 5
    missed their first token, no two in one run, and none its pace. Three runs were looked at. In
    two the forecast was too hopeful, by 18 ms and 0.3 ms: it counts prefills in full batches, and
    real ones end where tokens are due. The third is the worst that was found, with 4 late of 176.
    Five prefills ran alone in one batch, since the last of them was in time so; the batch ended up
    to 48 ms after the others were due.

    *Whole answers* beside these are not drawn: there the property does not hold. A whole answer is
    taken in any case, and once some are nearly late the iterations are short for their sake, while
    paced decodes sit out: of 24,353 requests of 100 such loads 9 missed their pace.
    """
    tiers = TierSet(
        name="paces",
        default="t0",
        tiers={
            f"t{n}": Tier(slo=slo, importance=1.0 if n else importance)
            for n, slo in enumerate(slos)
        },
    )
    requests = requests_of(load["workload"], load, tiers, 200)
    verdicts = outcomes(load, requests, tiers, draft)
    kept = [verdict for verdict in verdicts if not verdict.relegated]
    missed = Counter(verdict.missed for verdict in kept if not verdict.slo_met)
    note(f"{load}, {slos}, {importance}, {draft}: {dict(missed)} of {len(kept)}")
    assert len(kept) > len(verdicts) / 10
    assert set(missed) <= {Missed.TTFT}
    assert missed[Missed.TTFT] <= LATE_FIRST * len(kept)


# Of two that decode together and end about when they must, either may be late.
LUCK = 3


@pytest.mark.slow
@searched
@given(
    load=loads_of_any,
    slos=st.lists(st.one_of(tight, whole), min_size=1, max_size=2),
    importance=st.sampled_from((2.0, 4.0, 10.0)),
)
@example(
    load={
        "workload": "sharegpt",
        "definition": Definition.TTLT,
        "times": 1.4,
        "burstiness": 3.0,
        "seed": 2,
    },
    slos=[Slo(ttft_s=1.2, tbt_s=0.06)],
    importance=4.0,
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
    """Each request comes twice at once, and one of the two is more important.

    That a larger importance never loses to a smaller one for the same cost would be more. It does
    not hold strictly, so this is weaker in two ways.

    - *Twins alone are compared*, not requests of the same cost that come at other times: these find
      another queue.
    - *Three pairs of a load* may lose the more important twin alone, and three more important
      requests may be lost than others. Importance decides which prefill runs and who gives way. It
      takes KV from decodes, but no time: twins that decode together make their tokens in the same
      iterations, and where whole answers are too many for a pass, both are slow. So either may end
      a moment too late.

    On 320 loads 1,858 important requests missed their SLO, and 5,993 of the others. Of the former 9
    had a twin that met it; 166 had one before whole answers went by importance. On 100 loads judged
    by `ttlt`, drawn by a script, 811 missed it, and 2,310 of the others; none of the former had a
    twin that met it. To take time from decodes for more important prompts was tried. It cost other
    requests 2 to 18 points, and kept no more important ones than the margin of 0.2 s does.
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


@pytest.mark.parametrize("draft", slow_but([0.0], [0.0, 0.05]))
def test_every_request_ends_in_overload(draft: float) -> None:
    result = served("slackline", DEMO_3, 16.0, draft=draft)
    assert all(verdict is not None for verdict in result.verdicts)
    assert result.finished == len(result.verdicts)


# Requests of all seeds together that a larger fleet may lose more, by luck.
LOST_MORE = 1


# ShareGPT is left out: its long answers would take most of the time.
@pytest.mark.slow
@pytest.mark.parametrize("workload", ["chatbot", "coder", "mix"])
@settings(searched, max_examples=int(os.environ.get("RUNS", "1")))
@given(
    load=loads_of_any,
    slo=tight,
    beside=st.lists(st.one_of(tight, whole), max_size=1),
    draft=st.sampled_from((0.0, DRAFT)),
)
@example(
    load={"definition": Definition.TTLT, "times": 1.4, "burstiness": 3.0, "seed": 1},
    slo=Slo(ttft_s=0.6, tbt_s=0.06),
    beside=[],
    draft=0.0,
)
@example(
    load={"definition": Definition.MEAN_TPOT, "times": 1.4, "burstiness": 3.0, "seed": 1},
    slo=Slo(ttft_s=0.6, tbt_s=0.03),
    beside=[],
    draft=DRAFT,
)
def test_more_replicas_lose_no_more_requests_in_the_mean_over_seeds(
    workload: str, load: Load, slo: Slo, beside: list[Slo], draft: float
) -> None:
    """A fleet of two loses no more than one replica does, nor one of three more than two: of the
    same requests, with three seeds. One replica is offered 1.4 to 4 times what it carries, roughly.
    Where it loses more than by luck, three lose less.

    *The allowance*: which of two alike comes to grief is luck. On 90 loads drawn so, with a draft
    model and without `ttlt`, with 14,506 requests, none was lost more: one replica lost 2,011, two
    837 and three 606. On 24 others, drawn by a script, three replicas once lost one request that
    two had kept. On 137 loads of another script, with 21,180 requests, none was lost more: one
    replica lost 2,242, two 999 and three 615. Of these loads 88 were without a draft model, and 79
    were judged by `ttlt`.
    """
    load = {**load, "workload": workload}
    tiers = TierSet(
        name="fleet",
        default="t0",
        tiers={f"t{n}": Tier(slo=each) for n, each in enumerate((slo, *beside))},
    ).judged_by(load["definition"])
    lost = dict.fromkeys((1, 2, 3), 0)
    offered = 0
    for seed in range(load["seed"], load["seed"] + 3):
        requests = requests_of(workload, {**load, "seed": seed}, tiers, 50, replicas=2)
        offered += len(requests)
        for replicas in lost:
            fleet = Deployment("slackline", "a100-llama3-8b", replicas, draft=draft)
            verdicts = simulate(Traffic(requests, tiers, seed), fleet).verdicts
            lost[replicas] += sum(not (verdict and verdict.slo_met) for verdict in verdicts)
    note(f"{load}, {slo}, {beside}, {draft}: {lost} of {offered}")
    assert lost[2] <= lost[1] + LOST_MORE
    assert lost[3] <= lost[2] + LOST_MORE
    assert lost[3] < lost[1] or lost[1] <= LOST_MORE


@pytest.mark.slow
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
