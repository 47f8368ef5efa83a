"""A search for loads on which slackline is three points behind another policy.

`SEARCH=500 pytest tests/shared/policy/test_slackline_search.py` tries so many more.
"""

import os

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from shared.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo

REQUESTS = 240
BEHIND = 0.03
# At most so many requests are lost to chance: which of two alike comes to grief.
LUCK = 3
# Requests a second that one A100 carries, roughly.
CARRIED_RPS = {"chatbot": 10.0, "coder": 5.0, "mix": 4.5, "sharegpt": 3.0}
RIVALS = {
    "edf": {"chunk_tokens": "512"},
    "qoserve": {"alpha_low_s": "0.008"},
    "slos_serve": {},
    "vllm": {"max_num_batched_tokens": "512"},
}

tight = st.builds(Slo, ttft_s=st.sampled_from((0.3, 0.6, 1.2, 2.4)), tbt_s=st.floats(0.03, 0.1))
whole = st.builds(Slo, ttlt_s=st.sampled_from((15.0, 30.0, 60.0, 240.0)))
tier = st.builds(Tier, slo=st.one_of(tight, whole), share=st.sampled_from((0.3, 0.6, 1.0)))
loads = st.fixed_dictionaries(
    {
        "workload": st.sampled_from(sorted(CARRIED_RPS)),
        "tiers": st.lists(tier, min_size=1, max_size=3),
        "definition": st.sampled_from(Definition),
        "times": st.sampled_from((0.7, 0.9, 1.1, 1.4)),
        "burstiness": st.sampled_from((1.0, 3.0)),
        "seed": st.integers(0, 999),
    }
)
Load = dict[str, object]


def met(policy: str, requests: list[PlannedRequest], tiers: TierSet, seed: int) -> float:
    deployment = Deployment(
        policy, "a100-llama3-8b", settings=dict(RIVALS.get(policy, {})), draft=0.0
    )
    options = RunOptions(keep_times=False)
    return simulate(Traffic(requests, tiers, seed), deployment, options).met_fraction


@pytest.mark.parametrize("rival", RIVALS)
@settings(
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("SEARCH", "4")),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(load=loads)
def test_no_load_is_found_on_which_slackline_is_far_behind(rival: str, load: Load) -> None:
    named = {f"t{n}": each for n, each in enumerate(load["tiers"])}
    tiers = TierSet(name="search", default="t0", tiers=named).judged_by(load["definition"])
    rate_rps = CARRIED_RPS[load["workload"]] * load["times"]
    arrivals_s = draw_arrivals(
        Gaps(load["burstiness"]), rate_rps, REQUESTS / rate_rps, load["seed"]
    )
    requests = plan_requests(
        arrivals_s, named_workload(load["workload"], 8192), tiers, load["seed"]
    )
    ours, other = (met(each, requests, tiers, load["seed"]) for each in ("slackline", rival))
    note(f"{rival} {100 * other:.1f} %, slackline {100 * ours:.1f} % of {len(requests)}: {load}")
    assert ours >= other - BEHIND - LUCK / len(requests)
