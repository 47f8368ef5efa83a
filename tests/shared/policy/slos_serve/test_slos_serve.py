"""Tests of the policy SLOs-Serve: demands, budgets, batches, best-effort tier, and whole runs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import plan_requests
from loadgen.load.workload import CHATBOT, Synthetic
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.latency import LATENCIES
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.shape import BatchShape
from shared.policy.seam import Phase, View
from shared.policy.slos_serve import demand as slos_serve_demand
from shared.policy.slos_serve.batch import HORIZON, MARGIN_S, after
from shared.policy.slos_serve.budget import MAX_TIERS, PrefillRate, tier_along, tiers_of
from shared.policy.slos_serve.demand import FAR_S, LATELY_S, LOOSE_TPOT_S, PromptPrices
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo
from tests.rings import slow_but
from tests.shared.policy.slos_serve.slos_serving import accepted, decoding, offer, policy, waiting
from tests.shared.policy.views import NOW, Linear, Row, entries, shape_of, view, views

# ---------------------------------------------------------------- batches (section 3.2.2)


def test_a_batch_fills_the_tightest_tpot_of_the_decodes() -> None:
    seen = view(
        [decoding(0, tbt_s=0.05), decoding(1, tbt_s=0.1), waiting(2, tokens=5000, ttft_s=9.0)]
    )
    choice = policy().plan(seen)[0]
    got = entries(choice)
    assert Linear().batch_s(shape_of(seen, choice)) <= 0.05 - MARGIN_S
    more = replace(choice, caps=np.where(choice.slots == 2, got[2] + 1, 1).astype(np.int32))
    assert Linear().batch_s(shape_of(seen, more)) > 0.05 - MARGIN_S
    loose = view([decoding(1, tbt_s=0.1), waiting(2, tokens=5000, ttft_s=9.0)])
    assert entries(policy().plan(loose)[0])[2] > 2 * got[2]


@given(
    paces=st.lists(st.sampled_from([0.04, 0.05, 0.06, 0.08, 0.1]), min_size=1, max_size=8),
    prefill=st.integers(3000, 6000),
)
def test_along_a_horizon_every_decode_has_its_tokens_in_time_and_the_looser_ones_rest(
    paces: list[float], prefill: int
) -> None:
    seen = view(
        [
            *(decoding(n, tbt_s=tbt_s) for n, tbt_s in enumerate(paces)),
            waiting(99, tokens=prefill, ttft_s=60.0),
        ]
    )
    choices = policy().plan(seen)
    assert 1 <= len(choices) <= HORIZON
    at_s, came = 0.0, {n: list[float]() for n in range(len(paces))}
    for choice in choices:
        seconds = Linear().batch_s(shape_of(seen, choice))
        seen, at_s = after(seen, choice, seconds), at_s + seconds
        for slot in set(entries(choice)) & set(came):
            came[slot].append(at_s)
    for n, tbt_s in enumerate(paces):
        assert all(instant <= came[n][0] + k * tbt_s + 1e-6 for k, instant in enumerate(came[n]))
        assert at_s <= came[n][0] + len(came[n]) * tbt_s + 1e-6  # and the next one is not late yet
    if len(choices) == HORIZON and min(paces) == 0.05 and 0.1 in paces:
        assert len(came[paces.index(0.1)]) < len(came[paces.index(0.05)])


def test_a_batch_ends_at_a_prefill_deadline_inside_it() -> None:
    first, second = waiting(1, tokens=100, ttft_s=0.03), waiting(2, tokens=5000, ttft_s=9.0)
    seen = view([decoding(0), first, second])
    choice = policy().plan(seen)[0]
    assert entries(choice)[1] == 100
    assert Linear().batch_s(shape_of(seen, choice)) <= 0.03
    lost = view([decoding(0), replace(first, ttft_s=0.015), second])  # no batch could keep that
    assert Linear().batch_s(shape_of(lost, policy().plan(lost)[0])) > 0.045


@given(seen=views)
def test_only_best_effort_requests_lose_kv_for_a_prompt(seen: View) -> None:
    choice = policy().plan(seen)[0]
    standard = [
        slot for slot in choice.preempt if not seen.best_effort[seen.slot.tolist().index(slot)]
    ]
    decodes = (seen.phase == Phase.DECODE).nonzero()[0]
    need = (
        (seen.computed_tokens + seen.unsure_tokens)[decodes] // seen.block_tokens
        + 1
        - seen.kv_held_blocks[decodes]
    )
    assert not standard or np.maximum(need, 0).sum() > seen.kv_free_blocks


# ---------------------------------------------------------------- best-effort tier (section 4.1)


def test_best_effort_requests_lose_their_kv_for_a_standard_prompt_the_latest_first() -> None:
    # 20 blocks each, 21 soon
    best = [decoding(n, context=320, best_effort=True, arrived_s=float(n - 9)) for n in (1, 2, 3)]
    seen = view([*best, waiting(9, tokens=320, max_tokens=1)], capacity=70)
    choice = policy().plan(seen)[0]
    assert list(choice.preempt) == [3]
    assert entries(choice)[9] == 320


def test_without_burst_resilience_every_request_is_taken_and_prefills_go_first() -> None:
    by = policy(best_effort=False)
    seen = view([decoding(0), waiting(1, arrived_s=-1.0), waiting(2, arrived_s=-2.0)])
    assert list(entries(by.plan(seen)[0])) == [2, 1]
    assert set(entries(by.plan(view([decoding(0), decoding(1)]))[0])) == {0, 1}
    assert accepted(seen, [offer(n, tokens=9000) for n in range(5)], by) == [True] * 5


# ---------------------------------------------------------------- admission


def test_whose_first_token_cannot_come_in_time_is_declined_with_a_word_when_to_ask_again() -> None:
    seen = view([decoding(0), waiting(1, tokens=8000, ttft_s=1.5)])
    answer, late = policy().admit(
        seen, [offer(0, slo=Slo(ttft_s=5.0, tbt_s=0.1)), offer(1, tokens=6000)]
    )
    assert answer.accepted
    assert not late.accepted
    assert late.earliest_s is not None and 0.5 < late.earliest_s < 2.0


def test_of_those_that_come_together_as_many_as_possible_are_taken_or_the_important_ones() -> None:
    long, short = offer(0, tokens=6000), [offer(n, tokens=3000) for n in (1, 2)]
    assert accepted(view([]), [long, *short]) == [False, True, True]
    assert accepted(view([]), [offer(0, tokens=6000, importance=10.0), *short]) == [
        True,
        False,
        False,
    ]


WAITING = [waiting(n, tokens=3000, ttft_s=2.0, importance=0.5 + n / 10) for n in range(4)]


def test_whose_prefill_has_not_begun_gives_its_place_to_a_more_important_request() -> None:
    """Section 4.1: soft admission. The prompt of 10,000 fits beside one of 3,000."""
    two_s, by, seen = Slo(ttft_s=2.0, tbt_s=0.1), policy(), view(WAITING[:3])
    assert accepted(seen, [offer(tokens=10_000, slo=two_s, importance=0.5)], by) == [False]
    assert entries(by.plan(seen)[0]).keys() == {0}, "nobody gives way to an equal"
    assert accepted(seen, [offer(tokens=10_000, slo=two_s, importance=10.0)], by) == [True]
    choice = by.plan(seen)[0]
    assert list(choice.relegate) == [0, 1]
    assert entries(choice).keys() == {2}
    assert not list(by.plan(seen)[0].relegate), "it is said once"


def test_whose_prefill_has_begun_or_who_has_tokens_keeps_its_place() -> None:
    begun = [replace(row, phase=Phase.PREFILL, computed=10) for row in WAITING]
    moved = [replace(row, generated=1) for row in WAITING]
    for held in (begun, moved):
        urgent = offer(tokens=10_000, slo=Slo(ttft_s=2.0, tbt_s=0.1), importance=10.0)
        assert accepted(view(held), [urgent]) == [False]


def test_no_request_is_taken_that_leaves_the_decodes_no_time() -> None:
    """50 ms less 10 and the margin: decodes of 1,000 tokens take 0.13 ms each, so some 300 fit."""
    few, many = (
        [decoding(n, context=1000, max_tokens=6) for n in range(count)] for count in (250, 310)
    )
    assert accepted(
        view(few, capacity=50_000), [offer(slo=Slo(ttft_s=9.0, tbt_s=0.05), tokens=100)]
    ) == [True]
    assert accepted(
        view(many, capacity=50_000), [offer(slo=Slo(ttft_s=9.0, tbt_s=0.05), tokens=100)]
    ) == [False]


def test_memory_is_that_of_prompts_and_expected_outputs_of_standard_requests() -> None:
    by, one = policy(*[160] * 20), [offer(tokens=320)]  # 30 blocks
    # 15 blocks each, some 80 tokens expected
    running = [decoding(n, context=160, generated=80, max_tokens=500) for n in range(4)]
    assert accepted(view(running, capacity=90), one, by) == [True]
    assert accepted(view(running, capacity=89), one, by) == [False]
    best = [replace(row, best_effort=True) for row in running]
    assert accepted(view(best, capacity=45), one, by) == [True]


# ---------------------------------------------------------------- other SLOs than TTFT and TPOT


def test_a_ttlt_leaves_the_output_its_time_and_no_bounds_means_the_loose_pace() -> None:
    lengths = policy(*[100] * 20)._lengths
    slos = [Slo(ttlt_s=40.0), Slo(ttlt_s=4.0), Slo(ttft_s=1.0), Slo(tbt_s=0.03), Slo()]
    got = slos_serve_demand.of_offers(
        view([]), [offer(n, slo=slo) for n, slo in enumerate(slos)], lengths, PromptPrices()
    )
    assert got.tpot_s == pytest.approx([LOOSE_TPOT_S, 0.02, LOOSE_TPOT_S, 0.03, LOOSE_TPOT_S])
    assert got.due_unix_s - NOW == pytest.approx([30.0, 2.0, 1.0, FAR_S, FAR_S])
    held = [
        Row(slot=0, ttlt_s=4.0),
        decoding(1, tbt_s=math.inf, ttft_s=math.inf, generated=60, ttlt_s=1.0),
    ]
    got = slos_serve_demand.of_rows(view(held), np.arange(2), lengths, PromptPrices())
    assert got.tpot_s == pytest.approx([0.02, 1.0 / 40])
    assert got.due_unix_s[0] - NOW == pytest.approx(2.0)


class AllAttention(Linear):
    """As fitted to prompts of one length: what they cost counts as attention, and a token has no
    price but a rounding error.
    """

    def batch_s(self, shape: BatchShape) -> float:
        return 0.010 + 1e-20 * shape.prefill_tokens + 1e-5 * shape.prefill_sq


def test_a_profile_that_counts_prompts_as_attention_alone_does_not_shut_everyone_out() -> None:
    seen = view([], profile=AllAttention())
    assert accepted(seen, [offer(tokens=20), offer(1, tokens=20)]) == [True, True]
    # in chunks of 95 tokens, one in 0.1 s, within a TTFT of 1 s
    assert accepted(seen, [offer(tokens=500)]) == [True]
    assert accepted(seen, [offer(tokens=2000)]) == [False]


def test_an_impossible_slo_shortens_best_effort_batches_for_a_minute_only() -> None:
    by, fresh = policy(), policy()
    seen = view([waiting(1, tokens=5000, best_effort=True)])
    full = entries(fresh.plan(seen)[0])[1]
    assert accepted(view([]), [offer(slo=Slo(ttft_s=1.0, tbt_s=0.0001))], by) == [False]
    assert entries(by.plan(seen)[0])[1] < full / 4
    assert entries(by.plan(replace(seen, start_unix_s=NOW + LATELY_S + 1))[0])[1] == full


# ---------------------------------------------------------------- PB* (Eq. 2, 3)


@given(tight=st.integers(0, 40), loose=st.integers(0, 40))
def test_the_budget_falls_with_every_decode_and_batches_make_it(tight: int, loose: int) -> None:
    rate = PrefillRate(Linear(), (0.05, 0.1), 300.0, 0.1, MARGIN_S)
    now = rate.of((tight, loose))
    assert rate.of((tight + 1, loose)) <= now
    assert rate.of((tight, loose + 1)) <= now
    if tight:
        decodes = BatchShape(
            decodes=tight + -(-loose // 2), decode_context=300 * (tight + -(-loose // 2))
        )
        assert now == pytest.approx(Linear().prefill_budget(decodes, 0, 0.049, 9999) / 0.05)


def test_tiers_are_merged_into_the_tighter_neighbour() -> None:
    tpot_s = np.array([0.1, 0.05, 0.051, 0.02, 0.4, 0.05])
    tiers = tiers_of(tpot_s)
    assert tiers == (0.02, 0.05, 0.1, 0.4)
    assert len(tiers) == MAX_TIERS
    assert tier_along(tpot_s, tiers).tolist() == [2, 1, 1, 0, 3, 1]


# ---------------------------------------------------------------- the whole policy

CHAT = TierSet(
    name="chat",
    default="chat",
    tiers={"chat": Tier(slo=Slo(ttft_s=0.8, tbt_s=0.1, definition=Definition.MAX_TPOT_10))},
)


@pytest.mark.parametrize("latency", slow_but(["none"], ["none", "live"]))
def test_in_overload_those_taken_keep_their_slo_and_more_do_than_first_come_first_served(
    latency: str,
) -> None:
    arrivals = draw_arrivals(Gaps(), 11.0, 25.0, 3)
    requests = plan_requests(arrivals, Synthetic((CHATBOT,), 8192), CHAT, seed=3)

    def late(name: str) -> tuple[np.ndarray, list[bool]]:
        result = simulate(
            Traffic(requests, CHAT, seed=3),
            Deployment(name, "a100-llama3-8b", latency=LATENCIES[latency]),
        )
        broken = np.array([verdict is None or not verdict.slo_met for verdict in result.verdicts])
        return broken, [verdict is not None and verdict.relegated for verdict in result.verdicts]

    ours, relegated = late("slos_serve")
    theirs, _ = late("fcfs")
    assert 0 < sum(relegated) < 0.5 * len(requests)
    assert np.count_nonzero(ours & ~np.array(relegated)) <= 0.02 * len(requests)
    assert ours.sum() < 0.6 * theirs.sum()
