"""SLOs-Serve with `sit_out=true`: decodes that are early sit out a batch of prefills."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import plan_requests
from loadgen.load.workload import REASONING, Synthetic
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared.policy.seam import View
from shared.rules.tiers import load_tiers
from shared.vocabulary import Definition, Missed, Slo
from tests.shared.policy.slos_serve.slos_serving import accepted, decoding, offer, policy, waiting
from tests.shared.policy.views import Linear, Row, entries, shape_of, view

# Together 15 ms in a batch, and 50 ms apart.
DECODES = [decoding(n) for n in range(100)]


def since(seen: View, seconds: float) -> View:
    """The same view, the newest tokens of the decodes older by so much."""
    return replace(seen, newest_token_unix_s=seen.newest_token_unix_s - seconds)


def test_a_prompt_that_would_be_late_beside_the_decodes_runs_alone_while_they_can_wait() -> None:
    """It takes 18 ms alone and 23 beside the decodes."""
    seen = view([*DECODES, waiting(200, tokens=100, ttft_s=0.02)])
    assert entries(policy(sit_out=True).plan(seen)[0]) == {200: 100}
    assert len(entries(policy().plan(seen)[0])) == 101


@pytest.mark.parametrize(("ttft_s", "older_s"), [(0.025, 0.0), (0.015, 0.0), (0.02, 0.02)])
def test_decodes_run_where_the_prompt_is_in_time_or_lost_anyway_or_they_cannot_wait(
    ttft_s: float, older_s: float
) -> None:
    seen = since(view([*DECODES, waiting(200, tokens=100, ttft_s=ttft_s)]), older_s)
    assert set(range(100)) <= set(entries(policy(sit_out=True).plan(seen)[0]))


def test_the_batch_after_ends_before_a_decode_has_waited_a_tpot_for_its_token() -> None:
    seen = since(view([*DECODES, waiting(200, tokens=5000, ttft_s=9.0)]), 0.02)
    choice = policy(sit_out=True).plan(seen)[0]
    assert set(range(100)) <= set(entries(choice))
    assert Linear().batch_s(shape_of(seen, choice)) <= 0.03
    assert Linear().batch_s(shape_of(seen, policy().plan(seen)[0])) > 0.03


def test_a_prompt_waits_where_the_kv_is_short_for_it() -> None:
    rows: list[Row] = [*DECODES, waiting(200, tokens=100, ttft_s=0.02)]
    assert 200 not in entries(policy(sit_out=True).plan(view(rows, free=100))[0])


def test_admission_counts_on_it() -> None:
    one = [offer(tokens=100, slo=Slo(ttft_s=0.02, tbt_s=0.05))]
    assert accepted(view(DECODES), one, policy(*[10] * 20)) == [False]
    assert accepted(view(DECODES), one, policy(*[10] * 20, sit_out=True)) == [True]
    late = since(view(DECODES), 0.02)
    assert accepted(late, one, policy(*[10] * 20, sit_out=True)) == [False]


@pytest.mark.slow
@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=3, derandomize=True)
def test_windows_of_ten_tokens_hold_and_no_fewer_requests_are_served(seed: int) -> None:
    tiers = load_tiers("slos-serve-reasoning").judged_by(Definition.MAX_TPOT_10)
    source = Synthetic((REASONING,), 10_240)
    requests = plan_requests(draw_arrivals(Gaps(), 0.4, 150.0, seed), source, tiers, seed=seed)

    def misses(sit_out: str) -> np.ndarray:
        result = simulate(
            Traffic(requests, tiers, seed=seed),
            Deployment(
                "slos_serve",
                "a100-llama3-8b",
                settings={"sit_out": sit_out},
                facts=ReplicaFacts(context_tokens=10_240),
                draft=0.0,
            ),
        )
        return np.array([Missed.END if v is None else v.missed for v in result.verdicts])

    ours, printed = misses("true"), misses("false")
    assert not (ours == Missed.TBT).any()
    assert (ours == Missed.NOTHING).sum() >= (printed == Missed.NOTHING).sum()
