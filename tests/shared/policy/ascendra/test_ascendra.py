"""Tests of Ascendra: batches of low-priority replicas (LP), offload to high-priority ones (HP)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy.ascendra import elastic, lp_batch, offload
from shared.policy.ascendra.policy import HP, LP, Ascendra, Settings
from shared.policy.ascendra.relegated import standard_of
from shared.policy.chunk import decoding
from shared.policy.lengths import OutputLengths
from shared.policy.seam import Choice, Ended, Phase, View
from tests.shared.policy.views import (
    BLOCK,
    NOW,
    Linear,
    Row,
    decode,
    entries,
    rows,
    shape_of,
    summary,
    view,
)


def ascendra(**changed: object) -> Ascendra:
    return Ascendra(Settings(**changed))  # type: ignore[arg-type]


def chat(slot: int, **more: object) -> Row:
    """A request of the paper's ShareGPT: TTFT 1 s, TBT 150 ms."""
    return Row(**{"slot": slot, "ttft_s": 1.0, "tbt_s": 0.15, **more})  # type: ignore[arg-type]


def at(pool: str, made: Sequence[Row], **more: object) -> View:
    return replace(view(made, **more), pool=pool)  # type: ignore[arg-type]


def planned(policy: Ascendra, seen: View) -> tuple[Choice, list[int]]:
    """The batch, and the slots that are offloaded before it."""
    *before, batch = policy.plan(seen)
    assert all(not len(choice.slots) for choice in before)
    gone = [slot for choice in before for slot, why in choice.release if why == "offloaded"]
    assert not any(why == "offloaded" for _, why in batch.release)
    return batch, gone


def row_of(seen: View, slot: int) -> int:
    return seen.slot.tolist().index(slot)


seen_views = st.builds(
    lambda rs, moved, free: view([replace(r, offloaded=r.slot in moved) for r in rs], free=free),
    rows(),
    st.sets(st.integers(0, 24), max_size=6),
    st.one_of(st.none(), st.integers(0, 400)),
)

# ---------------------------------------------------------------- LP: three budgets (section 5.2)


@pytest.mark.parametrize(
    ("value", "order"),
    [("edf", [2, 3, 1]), ("fcfs", [1, 2, 3]), ("sjf", [3, 1, 2]), ("ljf", [2, 1, 3])],
)
def test_the_queue_is_sorted_by_the_value_that_was_chosen(value: str, order: list[int]) -> None:
    made = [
        chat(1, target=200, arrived_s=-0.3, ttft_s=3.0),
        chat(2, target=300, arrived_s=-0.2),
        chat(3, target=100, arrived_s=-0.1),
    ]
    batch, gone = planned(ascendra(value=value), at(LP, made))
    assert list(entries(batch)) == order
    assert gone == []


def test_the_compute_budget_is_the_tightest_tbt_of_the_running_decodes() -> None:
    """Linear: 10 ms, 30 us and 20 us for the decode and its context, 80 us a token and a little
    attention; 150 ms leave 1,743 tokens.
    """
    made = [
        decode(chat(0), context=200),
        decode(chat(1, tbt_s=0.3), context=200),
        chat(9, target=5000, ttft_s=60.0),
    ]
    seen = at(LP, made)
    assert lp_batch.compute_budget_s(seen, decoding(seen), seen.profile) == 0.15
    batch, _ = planned(ascendra(), seen)
    shape = shape_of(seen, batch)
    tokens = entries(batch)[9]
    assert seen.profile.batch_s(shape) <= 0.15 < seen.profile.batch_s(shape.with_chunk(1, tokens))
    assert 0.010 + 2 * 3e-5 + 400e-7 + 8e-5 * tokens + 0.5e-8 * tokens**2 == pytest.approx(
        0.15, abs=1e-4
    )


def test_a_tbt_that_the_decodes_alone_exceed_binds_nothing() -> None:
    made = [
        decode(chat(0, tbt_s=0.005)),
        decode(chat(1, tbt_s=0.05)),
        chat(9, target=5000, ttft_s=60.0),
    ]
    seen = at(LP, made)
    assert lp_batch.compute_budget_s(seen, decoding(seen), seen.profile) == 0.05
    only = at(LP, made[:1])
    assert lp_batch.compute_budget_s(only, decoding(only), only.profile) == math.inf
    best_effort = at(LP, [replace(made[0], tbt_s=0.1, best_effort=True)])
    standard = standard_of(best_effort, decoding(best_effort))
    assert lp_batch.compute_budget_s(best_effort, standard, best_effort.profile) == math.inf


def test_the_memory_budget_holds_back_a_request_that_does_not_fit_and_all_behind_it() -> None:
    made = [
        summary(1, target=160, arrived_s=-3),
        summary(2, target=800, arrived_s=-2),
        summary(3, target=16, arrived_s=-1),
    ]
    batch, _ = planned(ascendra(value="fcfs"), at(LP, made, free=40))
    assert entries(batch) == {1: 160}


@given(
    seen=seen_views,
    pool=st.sampled_from([LP, ""]),
    value=st.sampled_from(["edf", "sjf", "fcfs", "ljf"]),
)
def test_an_lp_batch_keeps_all_three_budgets_and_the_batch_size(
    seen: View, pool: str, value: str
) -> None:
    seen, policy = (
        replace(seen, pool=pool),
        ascendra(value=value, batch_requests=12, batch_tokens=1024),
    )
    batch, _ = planned(policy, seen)
    shape, chosen = shape_of(seen, batch), entries(batch)
    decodes = standard_of(seen, decoding(seen))
    assert shape.prefill_tokens == 0 or shape.tokens <= 1024
    assert (
        shape.prefills == 0
        or seen.profile.batch_s(shape)
        <= lp_batch.compute_budget_s(seen, decodes, seen.profile) + 1e-12
    )
    of = [row_of(seen, slot) for slot in chosen]
    new = [r for r in of if seen.phase[r] == Phase.WAITING and not seen.best_effort[r]]
    begun = (seen.phase == Phase.PREFILL) & ~seen.best_effort
    running = len(decodes.rows) + int(np.count_nonzero(begun))
    assert len(new) <= max(0, 12 - running + len(decodes.victims))
    assert len(of) <= 12 or not seen.best_effort[of].any()


@given(
    seed=st.integers(0, 10_000),
    value=st.sampled_from(["edf", "sjf", "fcfs", "ljf"]),
    most=st.integers(0, 40),
)
def test_a_long_queue_is_ordered_as_if_all_of_it_had_been_sorted(
    seed: int, value: str, most: int
) -> None:
    rng = Random(seed)
    made = [
        Row(
            slot=slot,
            target=rng.choice([16, 40, 300]),
            arrived_s=-rng.randrange(8) / 4,
            ttft_s=rng.choice([1.0, 2.0, math.inf]),
        )
        for slot in rng.sample(range(300), 60)
    ]
    seen = view(made)
    queue = np.arange(len(made))
    of = lp_batch.VALUES[value]  # type: ignore[index]
    found = lp_batch.by_value(seen, queue, of, most)
    worth = dict(zip(queue.tolist(), of(seen, queue).tolist(), strict=True))
    every = sorted(queue.tolist(), key=lambda n: (-worth[n], made[n].arrived_s, made[n].slot))
    assert found.tolist() == every[:most]


# ---------------------------------------------------------------- offload (section 5.3)

# The worst batch at HP, 2,048 tokens: 10 ms + 163.84 ms + 20.97 ms. Alone, 640 tokens take 10 +
# 51.2 + 2.05 ms.
WORST_S = 0.010 + 8e-5 * 2048 + 0.5e-8 * 2048**2
OWN_S = 0.010 + 8e-5 * 640 + 0.5e-8 * 640**2


# Of 3,072 tokens, in two batches.
LONG_S = WORST_S + 0.010 + 8e-5 * 1024 + 1e-8 * (2048 * 1024 + 1024**2 / 2)


@pytest.mark.parametrize(
    ("left_s", "worst_batches", "leaves", "until_next_s", "target"),
    [
        (WORST_S + OWN_S + 0.001, 1.0, False, 0.0, 640),
        (WORST_S + OWN_S - 0.001, 1.0, True, 0.0, 640),
        (OWN_S - 0.001, 1.0, False, 0.0, 640),  # not even an idle HP could
        (WORST_S + OWN_S + 0.001, 1.1, True, 0.0, 640),
        (OWN_S + 0.001, 0.0, False, 0.0, 640),
        # it would become urgent during this iteration
        (WORST_S + OWN_S + 0.1, 1.0, False, 0.09, 640),
        (WORST_S + OWN_S + 0.1, 1.0, True, 0.11, 640),
        # longer than the largest batch: predicted in its parts
        (WORST_S + LONG_S + 0.001, 1.0, False, 0.0, 3072),
        (WORST_S + LONG_S - 0.001, 1.0, True, 0.0, 3072),
    ],
)
def test_the_threshold_is_the_worst_batch_at_hp_and_the_own_prefill(
    left_s: float, worst_batches: float, leaves: bool, until_next_s: float, target: int
) -> None:
    seen = view([chat(0, target=target, arrived_s=left_s - 1.0)])
    found = offload.urgent(
        seen, Linear(), until_next_s=until_next_s, batch_tokens=2048, worst_batches=worst_batches
    )
    assert found.tolist() == ([0] if leaves else [])


def test_an_urgent_request_that_fits_the_batch_stays_and_one_that_does_not_leaves() -> None:
    full = [decode(chat(i), context=16) for i in range(128)]
    urgent = chat(500, target=640, arrived_s=-0.8)
    batch, gone = planned(ascendra(), at(LP, [*full[:100], urgent]))
    assert (500 in entries(batch), gone) == (True, [])
    batch, gone = planned(ascendra(), at(LP, [*full, urgent]))
    assert (500 in entries(batch), gone) == (False, [500])


def test_an_urgent_request_that_would_be_cut_leaves_and_its_share_goes_to_the_next() -> None:
    made = [
        decode(chat(0)),
        chat(1, target=1400, arrived_s=-0.7),
        chat(2, target=1400, arrived_s=-0.69),
        chat(3, target=80, ttft_s=9.0),
    ]
    batch, gone = planned(ascendra(), at(LP, made))
    assert gone == [2]
    assert entries(batch) == {0: 1, 1: 1400, 3: 80}


@given(seen=seen_views, worst=st.sampled_from([0.0, 1.0, 20.0]))
def test_only_standard_requests_that_never_began_and_have_not_been_offloaded_are(
    seen: View, worst: float
) -> None:
    seen = replace(seen, pool=LP)
    batch, gone = planned(ascendra(worst_batches=worst, batch_requests=8), seen)
    assert len(set(gone)) == len(gone)
    assert not set(gone) & (set(entries(batch)) | set(batch.relegate) | set(batch.preempt))
    for slot in gone:
        row = row_of(seen, slot)
        assert (seen.phase[row], seen.computed_tokens[row], seen.generated_tokens[row]) == (
            Phase.WAITING,
            0,
            0,
        )
        assert not seen.best_effort[row]
        assert not seen.offloaded[row]
        assert NOW < seen.first_due_unix_s[row] < math.inf


# ---------------------------------------------------------------- HP: prefill first (section 6)


@given(seen=seen_views, elastic=st.booleans())
def test_hp_is_prefill_first_and_fcfs_within_kv(seen: View, elastic: bool) -> None:
    seen = replace(seen, pool=HP)
    batch, gone = planned(ascendra(elastic=elastic), seen)
    assert gone == []
    chosen = entries(batch)
    of = [row_of(seen, slot) for slot in chosen]
    standard = [row for row in of if not seen.best_effort[row]]
    prefills = [row for row in standard if seen.phase[row] != Phase.DECODE]
    assert not prefills or prefills == of, "never mixed"
    if prefills:
        assert sum(chosen.values()) <= 2048
        assert not batch.preempt
    arrived = [float(seen.arrived_unix_s[row]) for row in prefills]
    assert arrived == sorted(arrived)
    held = seen.kv_free_blocks + sum(
        int(seen.kv_held_blocks[row_of(seen, s)]) for s in batch.preempt
    )
    for row, cap in zip(of, chosen.values(), strict=True):
        held -= max(
            0,
            -(-int(seen.computed_tokens[row] + seen.unsure_tokens[row] + cap) // BLOCK)
            - int(seen.kv_held_blocks[row]),
        )
        assert held >= 0


@given(seen=seen_views)
def test_requests_that_begin_at_hp_leave_the_reserve_free_with_all_their_prompts(
    seen: View,
) -> None:
    seen = replace(seen, pool=HP)
    batch, _ = planned(ascendra(), seen)
    begins = [
        row for slot in entries(batch) if seen.phase[row := row_of(seen, slot)] == Phase.WAITING
    ]
    if len(begins) > 1 or (begins and (seen.phase != Phase.WAITING).any()):
        promised = [*begins, *np.flatnonzero(seen.phase == Phase.PREFILL).tolist()]
        need = sum(
            max(0, -(-int(seen.target_tokens[r]) // BLOCK) - int(seen.kv_held_blocks[r]))
            for r in promised
        )
        assert seen.kv_free_blocks - need >= elastic.reserve_blocks(seen, OutputLengths(), 0.1)


def test_the_reserve_is_the_peak_that_the_history_of_lengths_foretells() -> None:
    """Three requests of 160 tokens, of which 100, 40 and 20 are still to come: (480 + 3 * 20), (320
    + 2 * 40), (160 + 100) at the ends.
    """
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe(Ended("a", 10, 500, 120))
    made = [
        decode(chat(i, application=0), context=160, generated=made)
        for i, made in enumerate((20, 80, 100))
    ]
    seen = view(made, capacity=100)
    assert elastic.reserve_blocks(seen, lengths, 0.0) == math.ceil(60 / BLOCK)
    assert elastic.reserve_blocks(seen, lengths, 0.1) == 10  # the tenth is more
    # nothing is known of "a"
    assert elastic.reserve_blocks(seen, OutputLengths(), 0.0) == 0
    assert elastic.reserve_blocks(view(made[:1], capacity=100), lengths, 0.0) == math.ceil(
        100 / BLOCK
    )


def test_the_batch_of_hp_is_elastic_and_that_of_lp_is_not() -> None:
    made = [decode(chat(i), context=16) for i in range(150)] + [chat(500, target=16)]
    assert 500 in entries(planned(ascendra(), at(HP, made))[0])
    assert 500 not in entries(planned(ascendra(elastic=False), at(HP, made))[0])
    assert 500 not in entries(planned(ascendra(), at(LP, made))[0])
