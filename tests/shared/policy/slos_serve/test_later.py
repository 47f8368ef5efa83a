"""SLOs-Serve with `long_deadlines=work`: what is due much later counts as work alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import plan_requests
from loadgen.load.workload import AZURE_CODE, CHATBOT, Shape, Synthetic
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.shape import BatchShape
from shared.policy.slos_serve.later import LATER_S, decode_tokens
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Slo
from tests.shared.policy.slos_serve.slos_serving import accepted, decoding, offer, policy
from tests.shared.policy.views import Linear, Row, view

HALF_AN_HOUR = [Row(slot=n, target=320, ttlt_s=1800.0) for n in range(10)]


def test_requests_with_half_an_hour_that_wait_keep_no_other_from_the_memory() -> None:
    """They will hold 30 blocks each."""
    seen, one = view(HALF_AN_HOUR, capacity=200), [offer(tokens=320)]
    assert accepted(seen, one, policy(*[160] * 20)) == [False]
    assert accepted(seen, one, policy(*[160] * 20, long_deadlines="work")) == [True]
    running = view([decoding(n, context=320, max_tokens=500) for n in range(6)], capacity=200)
    assert accepted(running, one, policy(*[160] * 20, long_deadlines="work")) == [False]


def test_a_prefill_that_is_due_soon_counts_with_its_memory() -> None:
    soon = [Row(slot=n, target=320, ttlt_s=2 * LATER_S - 4.0) for n in range(10)]
    seen = view(soon, capacity=200)
    assert accepted(seen, [offer(tokens=320)], policy(*[160] * 20, long_deadlines="work")) == [
        False
    ]


@pytest.mark.parametrize(("output", "taken"), [(20, True), (400, False)])
def test_prompts_and_outputs_that_are_due_later_count_as_work(output: int, taken: bool) -> None:
    """Half a minute has time for some 330,000 prompt tokens. Each prompt is 8,000 and as many more
    as take the time of its attention, 4,000; each output token takes as long as ten of them.
    """
    rows = [Row(slot=n, target=8000, ttlt_s=60.0) for n in range(23)]
    by = policy(*[output] * 20, long_deadlines="work")
    seen, one = view(rows, capacity=200_000), offer(tokens=8000, slo=Slo(ttlt_s=60.0))
    assert accepted(seen, [one], by) == [taken]


@given(context=st.integers(0, 20_000))
def test_the_price_of_a_decode_is_the_time_that_it_adds_to_a_batch(context: int) -> None:
    beside = BatchShape(512, 1, 512**2, decodes=1)
    more = beside._replace(decodes=2, decode_context=context)
    token_s = (Linear().batch_s(BatchShape(1024)) - Linear().batch_s(BatchShape(512))) / 512
    added_s = Linear().batch_s(more) - Linear().batch_s(beside)
    assert decode_tokens(Linear(), context) * token_s == pytest.approx(added_s)


TIERS = TierSet(
    name="t",
    default="chat",
    tiers={
        "chat": Tier(slo=Slo(ttft_s=2.0, tbt_s=0.1)),
        "later": Tier(slo=Slo(ttlt_s=600.0)),
    },
)


def served(shape: Shape, seed: int, rate_rps: float, long_deadlines: str) -> SimulationResult:
    requests = plan_requests(
        draw_arrivals(Gaps(), rate_rps, 40.0, seed), Synthetic((shape,), 8192), TIERS, seed=seed
    )
    return simulate(
        Traffic(requests, TIERS, seed=seed),
        Deployment(
            "slos_serve",
            "a100-llama3-8b",
            settings={"long_deadlines": long_deadlines},
            facts=ReplicaFacts(kv_blocks=2500),
            draft=0.0,
        ),
    )


@pytest.mark.slow
@given(seed=st.integers(0, 1000), rate_rps=st.sampled_from([4.0, 8.0, 12.0]))
@settings(deadline=None, max_examples=6, derandomize=True)
def test_those_taken_keep_their_slo_also_where_memory_is_short(seed: int, rate_rps: float) -> None:
    verdicts = served(CHATBOT, seed, rate_rps, "work").verdicts
    taken = [verdict for verdict in verdicts if verdict is not None and not verdict.relegated]
    assert sum(not verdict.slo_met for verdict in taken) <= 0.03 * len(verdicts)


@pytest.mark.slow
def test_more_keep_their_slo_where_many_have_time() -> None:
    met = {
        way: np.mean(
            [v is not None and v.slo_met for v in served(AZURE_CODE, 3, 5.0, way).verdicts]
        )
        for way in ("held", "work")
    }
    assert met["work"] > met["held"] + 0.05
