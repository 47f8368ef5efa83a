"""Tests of the properties that every policy has, the orders of the baselines, and the registry."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.policy import chunk, registry, sarathi
from shared.policy.seam import Phase, View
from tests.shared.policy.views import (
    BLOCK,
    Row,
    decode,
    entries,
    interactive,
    rows,
    shape_of,
    summary,
    view,
    views,
)
from tests.shared.routing.digests import offer

NAMES = registry.names()
# these give best-effort KV up for standard prompts, and decline what cannot be served in time
PROMISING = ("slos_serve", "slackline")


def need_blocks(seen: View, i: int, cap: int) -> int:
    return max(
        0,
        -(-int(seen.computed_tokens[i] + seen.unsure_tokens[i] + cap) // BLOCK)
        - int(seen.kv_held_blocks[i]),
    )


def prefilling(seen: View, slot: int) -> bool:
    return bool(seen.phase[seen.slot.tolist().index(slot)] != Phase.DECODE)


@pytest.mark.parametrize("name", NAMES)
@given(seen=views)
def test_entries_stay_within_kv_and_target(name: str, seen: View) -> None:
    choice = registry.make(name).plan(seen)[0]
    at = {slot: i for i, slot in enumerate(seen.slot.tolist())}
    free = seen.kv_free_blocks + sum(int(seen.kv_held_blocks[at[slot]]) for slot in choice.preempt)
    planned = entries(choice)
    for slot, cap in planned.items():
        i = at[slot]
        assert slot not in choice.preempt
        if seen.phase[i] == Phase.DECODE:
            assert cap == 1
        else:
            assert 1 <= cap <= seen.target_tokens[i] - seen.computed_tokens[i]
    # The core cuts from the end: every prefix must fit.
    for slot, cap in planned.items():
        free -= need_blocks(seen, at[slot], cap)
        assert free >= 0


# SOLA leaves decodes out of an iteration that is for first tokens (its Eq. 1), SLOs-Serve, Ascendra
# and Slackline best-effort ones that take others' time.
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("sola", "slos_serve", "ascendra", "slackline")]
)
@given(seen=views)
def test_every_decode_runs_unless_it_was_preempted_for_lack_of_kv(name: str, seen: View) -> None:
    choice = registry.make(name).plan(seen)[0]
    decodes = [int(s) for s, p in zip(seen.slot, seen.phase, strict=True) if p == Phase.DECODE]
    assert set(entries(choice)) | set(choice.preempt) >= set(decodes)
    short = (
        sum(need_blocks(seen, i, 1) for i in range(seen.rows) if seen.phase[i] == Phase.DECODE)
        > seen.kv_free_blocks
    )
    assert bool(choice.preempt) == short


# They also preempt best-effort requests for the prompts of standard ones (SLOs-Serve section 4.1).
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PROMISING])
@given(seen=views)
def test_no_more_is_preempted_than_the_decodes_need(name: str, seen: View) -> None:
    choice = registry.make(name).plan(seen)[0]
    at = {slot: i for i, slot in enumerate(seen.slot.tolist())}
    need = {s: need_blocks(seen, i, 1) for s, i in at.items() if seen.phase[i] == Phase.DECODE}
    for spared in choice.preempt:
        gone = set(choice.preempt) - {spared}
        free = seen.kv_free_blocks + sum(int(seen.kv_held_blocks[at[s]]) for s in gone)
        assert sum(n for s, n in need.items() if s not in gone) > free


@pytest.mark.parametrize("name", NAMES)
@given(seen=views)
def test_best_effort_prefills_go_last_and_run_when_nothing_else_waits(
    name: str, seen: View
) -> None:
    choice = registry.make(name).plan(seen)[0]
    best = {int(s): bool(b) for s, b in zip(seen.slot, seen.best_effort, strict=True)}
    best.update(dict.fromkeys(choice.relegate, True))
    classes = [best[s] for s in entries(choice) if prefilling(seen, s)]
    assert classes == sorted(classes)


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_view_is_planned_alike_again(name: str) -> None:
    rows = [decode(interactive(i)) for i in range(4)] + [
        summary(i, target=3000) for i in range(4, 9)
    ]
    policy = registry.make(name)
    first, second = (policy.plan(view(rows))[0] for _ in range(2))
    assert entries(first) == entries(second)
    assert list(first.relegate) == list(second.relegate)


def test_best_effort_goes_before_standard_then_prefills_then_the_latest_arrived() -> None:
    rows = [
        decode(interactive(0, arrived_s=-4), context=160),
        decode(interactive(1, arrived_s=-3), context=160),
        Row(slot=2, phase=Phase.PREFILL, target=400, computed=160, arrived_s=-9),
        decode(interactive(3, arrived_s=-9, best_effort=True), context=160),
    ]
    gone = []
    for _ in range(3):
        kept = [r for r in rows if r.slot not in gone]
        victims = chunk.decoding(view(kept, free=0)).victims
        assert len(victims) == 1
        gone.append(kept[int(victims[0])].slot)
    assert gone == [3, 2, 1]


def test_a_preempted_prefill_gets_no_chunk_in_the_same_iteration() -> None:
    rows = [
        decode(interactive(0), context=160),
        Row(slot=1, phase=Phase.PREFILL, target=400, computed=160),
    ]
    (choice,) = registry.make("fcfs").plan(view(rows, free=0))
    assert list(choice.preempt) == [1]
    assert entries(choice) == {0: 1}


def test_a_prefill_that_cannot_end_does_not_begin_and_holds_back_those_behind_it() -> None:
    begun = Row(slot=0, phase=Phase.PREFILL, target=480, computed=160, arrived_s=-1)
    rows = [Row(slot=1, target=800, arrived_s=-3), Row(slot=2, target=16, arrived_s=-2), begun]
    (choice,) = registry.make("fcfs", {"chunk_tokens": "4096"}).plan(view(rows, free=60))
    # 20 of the 60 blocks are promised to it; 50 are not left for the first
    assert entries(choice) == {0: 320}
    (choice,) = registry.make("fcfs", {"chunk_tokens": "4096"}).plan(view(rows, free=71))
    assert entries(choice) == {1: 800, 2: 16, 0: 320}


def test_prefills_leave_each_decode_a_block_to_grow_into() -> None:
    rows = [decode(interactive(i), context=161) for i in range(4)] + [Row(slot=9, target=160)]
    plan = registry.make("fcfs").plan
    assert 9 not in entries(plan(view(rows, free=13))[0])
    assert entries(plan(view(rows, free=14))[0])[9] == 160


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("fcfs", [1, 2, 3, 4]),
        ("edf", [4, 2, 1, 3]),
        ("srpf", [4, 3, 2, 1]),  # 2 has 400 left of 900
        ("sjf", [2, 4, 3, 1]),  # 2 has begun
    ],
)
def test_each_baseline_has_its_order(name: str, order: list[int]) -> None:
    made = [
        summary(1, target=600, arrived_s=-4),
        summary(2, target=900, computed=500, phase=Phase.PREFILL, arrived_s=-3, ttlt_s=100.0),
        Row(slot=3, target=300, arrived_s=-2),
        interactive(4, target=200, arrived_s=-1),
    ]
    (choice,) = registry.make(name, {"chunk_tokens": "5000"}).plan(view(made))
    assert list(entries(choice)) == order


@pytest.mark.parametrize("name", ["fcfs", "edf", "srpf", "sjf"])
def test_a_chunk_counts_the_decodes_and_shrinks_to_the_iteration_that_is_asked_for(
    name: str,
) -> None:
    seen = view([*(decode(interactive(i)) for i in range(6)), summary(9, target=5000)])
    assert entries(registry.make(name).plan(seen)[0])[9] == 250
    (choice,) = registry.make(name, {"chunk_tokens": "2500", "iteration_s": "0.05"}).plan(seen)
    assert 250 < entries(choice)[9] < 2494
    assert 0.0499 < seen.profile.batch_s(shape_of(seen, choice)) <= 0.05


@pytest.mark.parametrize("name", ["fcfs", "edf", "srpf", "sjf"])
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000), free=st.integers(0, 400), best=st.sampled_from([0.0, 0.5, 0.98])
)
def test_a_long_queue_is_planned_as_if_all_of_it_had_been_sorted(
    name: str, seed: int, free: int, best: float
) -> None:
    rng = Random(seed)
    made = [decode(interactive(i)) for i in range(5)]
    for slot in range(5, 120):
        begun = rng.random() < 0.05
        made.append(
            Row(
                slot=slot,
                phase=Phase.PREFILL if begun else Phase.WAITING,
                computed=16 if begun else 0,
                target=rng.choice([17, 40, 300, 2000]),
                arrived_s=-rng.randrange(20) / 4,
                ttlt_s=rng.choice([math.inf, 10.0, 600.0]),
                best_effort=rng.random() < best,
            )
        )
    seen, policy = view(made, free=free), registry.make(name, {"chunk_tokens": "40"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sarathi,
            "_within_reach",
            lambda view, queue, key, entries: np.ones(len(queue), dtype=np.bool_),
        )
        whole = policy.plan(seen)[0]
    assert entries(policy.plan(seen)[0]) == entries(whole)


@given(made=rows(), budget_s=st.floats(0.01, 0.5))
def test_chunks_fill_the_time_budget_to_the_token(made: list[Row], budget_s: float) -> None:
    seen = view(made, free=1_000_000)
    queue = np.flatnonzero(seen.phase != Phase.DECODE)
    choice = chunk.fill(
        seen, chunk.decoding(seen), queue, limit_tokens=1_000_000, budget_s=budget_s
    )
    shape, planned = shape_of(seen, choice), entries(choice)
    assert shape.prefills == 0 or seen.profile.batch_s(shape) <= budget_s
    left = [
        row
        for row in queue.tolist()
        if planned.get(made[row].slot, 0) < made[row].target - made[row].computed
    ]
    if left:  # one token more of the next in order does not fit
        given = planned.get(made[left[0]].slot, 0)
        with_one_more = replace(choice, caps=choice.caps.copy())
        if given:
            with_one_more.caps[-1] += 1
        else:
            with_one_more = replace(
                choice,
                slots=np.append(choice.slots, seen.slot[left[0]]),
                caps=np.append(choice.caps, np.int32(1)),
            )
        assert seen.profile.batch_s(shape_of(seen, with_one_more)) > budget_s


@pytest.mark.parametrize(("load_s", "first_tokens", "planned"), [
    (0.0, 100, {2, 3}), (0.05, 100, {2, 3}), (0.185, 100, {2}), (0.5, 1, {2}), (0.5, 100, {2})
])  # fmt: skip
def test_what_comes_back_from_the_host_takes_of_an_iterations_time_and_never_waits_for_ever(
    load_s: float, first_tokens: int, planned: set[int]
) -> None:
    seen = view([
        Row(slot=2, target=32 + first_tokens, computed=32, load_s=load_s),
        Row(slot=3, target=100),
    ])  # fmt: skip
    budget_s = 0.2
    choice = chunk.fill(
        seen, chunk.decoding(seen), np.arange(2), limit_tokens=1000, budget_s=budget_s
    )
    assert set(entries(choice)) == planned
    batch_s = seen.profile.batch_s(shape_of(seen, choice))
    assert batch_s + (load_s if load_s < budget_s else 0.0) <= budget_s


# they decline what cannot be served in time
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PROMISING])
def test_what_fits_the_context_and_the_kv_is_accepted(name: str) -> None:
    policy = registry.make(name)
    seen = view([], capacity=1000)
    answers = policy.admit(seen, [offer(prompt_tokens=p) for p in (10, 15_900, 16_000, 40_000)])
    assert [a.accepted for a in answers] == [True, True, False, False]
    assert all(a.accepted or a.reason for a in answers)


def test_unknown_names_and_settings_are_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"nosuch.*fcfs.*edf.*qoserve"):
        registry.make("nosuch")
    with pytest.raises(ConfigError, match=r"chunks.*chunk_tokens=256"):
        registry.make("fcfs", {"chunks": "1"})
    with pytest.raises(ConfigError, match="chunk_tokens"):
        registry.make("edf", {"chunk_tokens": "0"})
    with pytest.raises(ConfigError, match="hybrid"):
        registry.make("qoserve", {"hybrid": "maybe"})
    assert (
        registry.make("qoserve", {"hybrid": "false", "safety": "1.1", "router": "round_robin"}).name
        == "qoserve"
    )


@pytest.mark.parametrize("name", ["vllm", "fcfs", "edf", "sjf", "srpf"])
@given(seen=views)
def test_drop_late_drops_those_that_wait_past_their_deadline_and_nobody_else(
    name: str, seen: View
) -> None:
    """Ascendra section 8.6."""
    policy = registry.make(name, {"drop_late": "true"})
    choice = policy.plan(seen)[0]
    dropped = {slot for slot, why in choice.release if why == "dropped"}
    late = {
        int(slot)
        for slot, phase, made, first, last, best_effort in zip(
            seen.slot,
            seen.phase,
            seen.generated_tokens,
            seen.first_due_unix_s,
            seen.last_due_unix_s,
            seen.best_effort,
            strict=True,
        )
        if phase == Phase.WAITING
        and made == 0
        and not best_effort
        and min(first, last) < seen.start_unix_s
    }
    assert policy.declared.drops
    assert dropped == late
    assert not dropped & set(entries(choice))
    plain = registry.make(name)
    assert not plain.declared.drops
    assert not plain.plan(seen)[0].release
