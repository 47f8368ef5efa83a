"""Tests of the policy slackline by a search for loads on which it is three points behind any of the
ten other policies.

`SEARCH=500 pytest tests/shared/policy/slackline/test_search.py` tries so many loads of each
workload. A rival is stopped once it has lost too many requests to be three points ahead, so ten
cost little more than one. Loads that a search once found are kept below.
"""

import math
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.lab.papers.drawn import mix, several_bounds
from loadgen.lab.papers.loads import load_of
from loadgen.lab.papers.run import PROFILE, Run, execute
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.draft import DRAFT
from shared.policy import registry
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo
from tests.rings import slow_but
from tests.shared.policy.drawn_loads import CARRIED_RPS, Load, requests_of

REQUESTS = 240
BEHIND = 0.03
# At most so many requests are lost to chance: which of two alike comes to grief.
LUCK = 3
# The setting that suits most loads (docs/laboratory.md).
SETTINGS = {
    **{order: {"chunk_tokens": "512"} for order in ("fcfs", "edf", "sjf", "srpf")},
    "qoserve": {"alpha_low_s": "0.008"},
    "sola": {"max_batch_tokens": "1024"},
    "vllm": {"max_num_batched_tokens": "512"},
}
RIVALS = [name for name in registry.names() if name != "slackline"]

tight = st.builds(Slo, ttft_s=st.sampled_from((0.3, 0.6, 1.2, 2.4)), tbt_s=st.floats(0.03, 0.1))
whole = st.builds(Slo, ttlt_s=st.sampled_from((15.0, 30.0, 60.0, 240.0)))
tier = st.builds(Tier, slo=st.one_of(tight, whole), share=st.sampled_from((0.3, 0.6, 1.0)))
loads = st.fixed_dictionaries(
    {
        "tiers": st.lists(tier, min_size=1, max_size=3),
        "definition": st.sampled_from(Definition),
        "times": st.sampled_from((0.7, 0.9, 1.1, 1.4)),
        "burstiness": st.sampled_from((1.0, 3.0)),
        "replicas": st.sampled_from((1, 2)),
        "draft": st.sampled_from((0.0, DRAFT)),
        "seed": st.integers(0, 999),
    }
)


def traffic(workload: str, load: Load) -> Traffic:
    named = {f"t{n}": each for n, each in enumerate(load["tiers"])}
    tiers = TierSet(name="search", default="t0", tiers=named).judged_by(load["definition"])
    requests = requests_of(workload, load, tiers, REQUESTS, load["replicas"])
    return Traffic(requests, tiers, load["seed"])


def lost(policy: str, asked: Traffic, load: Load, most: int | None = None) -> int | None:
    """The requests that miss their SLO; None: more than `most`."""
    deployment = Deployment(
        policy,
        "a100-llama3-8b",
        load["replicas"],
        settings=SETTINGS.get(policy, {}),
        draft=load["draft"],
    )
    options = RunOptions(keep_times=False, most_missed=most)
    result = simulate(asked, deployment, options)
    missed = sum(verdict is None or not verdict.slo_met for verdict in result.verdicts)
    return None if result.stopped else missed


def ahead(workload: str, load: Load) -> dict[str, str]:
    """The policies that are far ahead on this load, in words."""
    asked = traffic(workload, load)
    count, ours = len(asked.requests), lost("slackline", asked, load)
    assert ours is not None
    most = math.ceil(ours - BEHIND * count - LUCK) - 1
    if most < 0:
        return {}  # nobody can be
    theirs = {rival: lost(rival, asked, load, most) for rival in RIVALS}
    return {
        rival: f"loses {each} of {count}, slackline {ours}"
        for rival, each in theirs.items()
        if each is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("workload", CARRIED_RPS)
@settings(
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("SEARCH", "1")),
    phases=[Phase.explicit, Phase.generate],  # to make an example smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
@given(load=loads)
def test_no_load_is_found_on_which_slackline_is_far_behind(workload: str, load: Load) -> None:
    found = ahead(workload, load)
    note(f"{workload}: {load}")
    assert not found


WITHIN_15_S, WITHIN_30_S = Tier(slo=Slo(ttlt_s=15.0)), Tier(slo=Slo(ttlt_s=30.0))
PLAIN: Load = {"definition": Definition.MAX_TPOT_10, "burstiness": 1.0, "replicas": 1, "draft": 0.0}
BY_LAST_TOKEN: Load = {**PLAIN, "definition": Definition.TTLT}
BY_DEADLINES: Load = {**PLAIN, "definition": Definition.DEADLINE}
WITHIN_300_MS = Tier(slo=Slo(ttft_s=0.3, tbt_s=0.08940812911684368))
# Loads on which it was far behind when a search found them (the fourth and fifth: a draw at
# random), and what it loses there now. Of the first, 239 requests, edf loses 1; of the second, 265,
# edf loses 54; of the third, 237, adaserve loses 15; of the fourth, 260, srpf loses 20, and of the
# fifth, 224, as many; of the sixth, 257, slos_serve loses 75; of the seventh, 259, edf loses 3; of
# the eighth, 236, qoserve loses 83.
FOUND = [
    ("chatbot", {**PLAIN, "tiers": [WITHIN_15_S], "times": 0.7, "seed": 159}, 1),
    (
        "sharegpt",
        {
            **PLAIN,
            "tiers": [WITHIN_30_S, Tier(slo=Slo(ttft_s=2.4, tbt_s=0.089), share=0.6)],
            "times": 1.4,
            "burstiness": 3.0,
            "replicas": 2,
            "seed": 192,
        },
        41,
    ),
    (
        "sharegpt",
        {
            **PLAIN,
            "tiers": [WITHIN_15_S, WITHIN_15_S, Tier(slo=Slo(ttft_s=2.4, tbt_s=0.099), share=0.6)],
            "times": 0.9,
            "draft": DRAFT,
            "seed": 878,
        },
        21,
    ),
    (
        "sharegpt",
        {
            **BY_LAST_TOKEN,
            "tiers": [
                Tier(slo=Slo(ttft_s=0.3, tbt_s=0.07), share=0.6),
                Tier(slo=Slo(ttft_s=0.6, tbt_s=0.089), share=0.3),
            ],
            "times": 1.1,
            "seed": 92,
        },
        57,
    ),
    (
        "sharegpt",
        {
            **BY_LAST_TOKEN,
            "tiers": [
                Tier(slo=Slo(ttft_s=1.2, tbt_s=0.04)),
                Tier(slo=Slo(ttft_s=0.3, tbt_s=0.054), share=0.6),
            ],
            "times": 0.7,
            "burstiness": 3.0,
            "seed": 9,
        },
        28,
    ),
    (
        "mix",
        {
            **BY_DEADLINES,
            "tiers": [
                WITHIN_300_MS,
                WITHIN_300_MS,
                Tier(slo=Slo(ttft_s=0.6, tbt_s=0.03), share=0.6),
            ],
            "times": 1.4,
            "replicas": 2,
            "seed": 180,
        },
        68,
    ),
    (
        "sharegpt",
        {
            **BY_DEADLINES,
            "tiers": [
                Tier(slo=Slo(ttft_s=1.2, tbt_s=0.06419520707267673), share=0.3),
                Tier(slo=Slo(ttlt_s=60.0), share=0.3),
                Tier(slo=Slo(ttlt_s=60.0), share=0.3),
            ],
            "times": 1.1,
            "seed": 3,
        },
        6,
    ),
    (
        "sharegpt",
        {
            **BY_DEADLINES,
            "tiers": [WITHIN_15_S, Tier(slo=Slo(ttft_s=1.2, tbt_s=0.06575797656645571), share=0.3)],
            "times": 0.9,
            "seed": 1,
        },
        86,
    ),
]


@pytest.mark.parametrize(("workload", "load", "most"), slow_but(FOUND[:1], FOUND))
def test_what_a_search_has_found_gets_no_worse(workload: str, load: Load, most: int) -> None:
    missed = lost("slackline", traffic(workload, load), load)
    assert missed is not None and missed <= most


@pytest.mark.slow
def test_overload_for_minutes_gets_no_worse() -> None:
    """This load is longer than those of a search. Of its 1,563 requests qoserve loses 113."""
    named = {
        "chat": Tier(slo=Slo(ttft_s=6.0, tbt_s=0.05)),
        "soon": Tier(slo=Slo(ttlt_s=30.0)),
        "later": Tier(slo=Slo(ttlt_s=90.0)),
    }
    tiers = TierSet(name="minutes", default="chat", tiers=named)
    load = load_of("QoServe, conversations", 1.0)
    figures = execute(replace(load, tiers=tiers, duration_s=120.0, seed=61)).figures
    assert figures is not None
    assert figures.offered == 1563
    assert figures.violated <= 146 + LUCK


def whole_answers(workload: str, seed: int, *tiers: tuple[float, float], **other: Any) -> Run:
    """Tiers of a TTLT and a share each."""
    named = {f"t{n}": Tier(slo=Slo(ttlt_s=ttlt_s), share=s) for n, (ttlt_s, s) in enumerate(tiers)}
    judged = TierSet(name="whole", default="t0", tiers=named)
    given = {"profile": "a100-llama3-8b", "draft": 0.0, **other}
    return Run(policy="slackline", workload=workload, tiers=judged, seed=seed, **given)


# Loads drawn at random on which it once was behind the best of the ten others: how many requests
# are offered, and what it loses there now.
DRAWN = [
    (mix(6150, 400), 395, 33),
    (mix(6154, 400), 400, 79),
    (mix(6229, 400), 373, 106),
    (mix(7018, 400), 428, 0),
    (
        whole_answers(
            "chatbot", 9001, (25.0, 0.6), rate_rps=13.4, duration_s=90.0, definition="max-tpot-10"
        ),
        1257,
        288,
    ),
    (
        whole_answers(
            "summarizer",
            9014,
            (40.0, 0.37),
            (27.0, 0.41),
            rate_rps=10.8,
            duration_s=112.0,
            replicas=2,
            profile=PROFILE,
            definition="max-tpot-10",
            arrivals="gamma:3",
        ),
        1124,
        128,
    ),
    (
        whole_answers("sharegpt", 9017, (15.0, 0.4), rate_rps=7.22, duration_s=167.0, replicas=2),
        1213,
        684,
    ),
    (replace(mix(9119, 800), kv_tokens=20_000), 834, 128),
    (several_bounds(9406, 400), 469, 18),
    (several_bounds(9412, 400), 393, 39),
    (several_bounds(9418, 400), 373, 36),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "offered", "missed"), DRAWN, ids=[str(run.seed) for run, _, _ in DRAWN]
)
def test_what_random_loads_have_found_gets_no_worse(run: Run, offered: int, missed: int) -> None:
    figures = execute(run).figures
    assert figures is not None
    assert figures.offered == offered
    assert figures.violated <= missed + LUCK
