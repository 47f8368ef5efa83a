"""Tests of the policy slackline where an important prompt finds no KV: who gives up theirs."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import plan_requests
from loadgen.load.workload import CHATBOT, Synthetic
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from shared.policy import registry
from shared.policy.seam import Choice, Phase
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo
from tests.rings import slow_but
from tests.shared.policy.views import BLOCK, Row, decode, entries, view

# Ten decodes of 13 blocks each, of which the last came last. A block is free for each to grow by.
DECODES = [decode(Row(slot=n, tbt_s=0.3, arrived_s=-9.0 + 0.1 * n)) for n in range(10)]
FREE = 5 + len(DECODES)
# 13 blocks; its prefill takes 26 ms, and must begin now
PROMPT = Row(slot=50, target=200, ttft_s=0.06, tbt_s=0.3, importance=2.0)


def planned(*rows: Row, free: int = FREE) -> Choice:
    return registry.make("slackline").plan(view(rows, free=free))[0]


def test_the_latest_of_the_least_important_gives_up_its_kv() -> None:
    choice = planned(*DECODES, PROMPT)
    assert list(choice.preempt) == [9]
    assert entries(choice)[50] == 200
    assert 9 not in entries(choice)
    less = [*DECODES[:3], replace(DECODES[3], importance=0.5), *DECODES[4:]]
    assert list(planned(*less, PROMPT).preempt) == [3]


@pytest.mark.parametrize(
    ("prompt", "free"),
    [
        (replace(PROMPT, importance=1.0), FREE),
        (replace(PROMPT, ttft_s=5.0), FREE),
        (PROMPT, 13 + len(DECODES)),
        (replace(PROMPT, best_effort=True), FREE),
    ],
    ids=["equally important", "with time to wait", "with KV free", "best-effort"],
)
def test_nobody_gives_up_kv_for_a_prompt(prompt: Row, free: int) -> None:
    assert list(planned(*DECODES, prompt, free=free).preempt) == []


def test_a_ttlt_leaves_time_to_compute_it_again() -> None:
    whole = decode(Row(slot=4, ttlt_s=600.0, arrived_s=-9.0))
    assert list(planned(*DECODES[:4], whole, *DECODES[5:], PROMPT).preempt) == [4]


def test_a_begun_prefill_gives_up_its_kv_too() -> None:
    begun = Row(
        slot=60,
        phase=Phase.PREFILL,
        target=400,
        computed=320,
        ttft_s=9.0,
        tbt_s=0.3,
        arrived_s=-1.0,
    )
    choice = planned(*DECODES, begun, PROMPT, free=FREE + 5)
    assert list(choice.preempt) == [60]
    assert 60 not in entries(choice)


def test_neither_the_equally_important_nor_who_is_about_to_end_gives_up_kv() -> None:
    equal = [replace(one, importance=2.0) for one in DECODES[:9]]
    last = DECODES[9]
    assert list(planned(*equal, last, PROMPT).preempt) == [9]
    assert list(planned(*equal, replace(last, max_tokens=5), PROMPT).preempt) == []
    small = replace(last, target=16, computed=16)
    assert list(planned(*equal, small, PROMPT).preempt) == []


def test_what_leaves_the_standard_class_gives_up_its_kv_another_time() -> None:
    late = Row(slot=60, phase=Phase.PREFILL, target=400, computed=320, ttft_s=0.01, tbt_s=0.3)
    choice = planned(*DECODES, late, PROMPT, free=FREE + 5)
    assert (list(choice.relegate), list(choice.preempt)) == ([60], [9])


def test_best_effort_requests_give_up_theirs_first() -> None:
    spare = replace(DECODES[0], best_effort=True)
    assert list(planned(spare, *DECODES[1:], PROMPT).preempt) == [0]


@pytest.mark.parametrize(("importance", "preempted"), [(2.0, []), (2.5, [8, 9])])
def test_those_who_give_up_kv_are_less_important_together(
    importance: float, preempted: list[int]
) -> None:
    """It needs 25 blocks, 5 are free, and each decode has 13."""
    decodes = [*DECODES[:8], *(replace(one, target=224, computed=224) for one in DECODES[8:])]
    prompt = replace(PROMPT, target=400, ttft_s=0.11, importance=importance)
    assert sorted(planned(*decodes, prompt).preempt) == preempted


@pytest.mark.parametrize("seed", slow_but([2], [1, 2]))
def test_where_kv_is_short_nearly_all_important_requests_are_in_time(seed: int) -> None:
    """KV for 30,000 tokens is too little for two fifths of these requests."""
    slo = Slo(ttft_x=5.0, tbt_s=0.1, definition=Definition.MAX_TPOT_10)
    tiers = TierSet(name="chat", default="chat", tiers={"chat": Tier(slo=slo)})
    arrivals_s = draw_arrivals(Gaps(), 10.0, 30.0, seed)
    requests = plan_requests(
        arrivals_s, Synthetic((CHATBOT,), 8192), tiers, seed=seed, important=0.2
    )
    facts = ReplicaFacts(kv_blocks=30_000 // BLOCK, block_tokens=BLOCK)
    deployment = Deployment("slackline", "a100-llama3-8b", facts=facts, draft=0.0)

    run = simulate(Traffic(requests, tiers, seed), deployment, RunOptions(check_every=50))
    assert run.finished == len(run.verdicts), f"seed {seed}: every request ends"
    met = [
        verdict is not None and verdict.slo_met
        for request, verdict in zip(requests, run.verdicts, strict=True)
        if request.importance > 1
    ]
    assert np.mean(met) >= 0.9, f"seed {seed}"
