"""Ascendra: the value function under three budgets, offload, tickets, elastic batches, overload,
the refitted model; pools of a fleet.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.latency import LATENCIES, Latency
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf import profile_file as store
from shared.perf.five_coefficients import AscendraProfile
from shared.perf.shape import BatchShape
from shared.policy.ascendra import elastic, lp_batch, offload
from shared.policy.ascendra.policy import HP, LP, Ascendra, Settings
from shared.policy.ascendra.refit import LEAST_BATCHES, Refitted, units_of
from shared.policy.ascendra.relegated import SHARE_OF_TIME, standard_of
from shared.policy.chunk import decoding
from shared.policy.lengths import OutputLengths
from shared.policy.seam import Choice, Ended, Observation, Phase, Rows, View
from shared.rules.tiers import load_tiers
from shared.schemas import Offer
from shared.vocabulary import FinishReason, RequestKey, ServiceClass, Slo
from tests.rings import slow_but
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

PAPER = load_tiers("ascendra-8b-sharegpt")


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

# ---------------------------------------------------------------- LP: value under three budgets (se


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


def test_the_token_budget_counts_decodes_and_cuts_the_last() -> None:
    made = [decode(summary(i)) for i in range(10)] + [
        summary(20, target=600),
        summary(21, target=600, arrived_s=0.1),
    ]
    batch, _ = planned(ascendra(batch_tokens=1000), at(LP, made))
    assert entries(batch) == {**dict.fromkeys(range(10), 1), 20: 600, 21: 390}


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


def test_no_more_than_the_batch_size_run_at_a_time() -> None:
    begun = Row(slot=500, phase=Phase.PREFILL, target=64, computed=16)
    waiting = [summary(i, target=16) for i in range(200, 240)]
    for decodes, new in ((0, 40), (100, 27), (127, 0), (140, 0)):
        made = [decode(summary(i)) for i in range(decodes)]
        batch, _ = planned(ascendra(), at(LP, [*made, begun, *waiting]))
        chosen = entries(batch)
        assert sum(slot < 200 for slot in chosen) == decodes
        assert sum(200 <= slot < 500 for slot in chosen) == new
        assert chosen[500] == 48


def test_a_prefill_cut_to_the_budget_goes_on_before_the_others() -> None:
    made = [
        Row(slot=0, phase=Phase.PREFILL, target=3000, computed=1000, ttft_s=60.0),
        chat(1, target=100),
    ]
    batch, _ = planned(ascendra(batch_tokens=512), at(LP, made))
    assert entries(batch) == {0: 512}


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
    every = sorted(
        queue.tolist(),
        key=lambda n: (-worth[n], made[n].arrived_s, made[n].slot),
    )
    assert found.tolist() == every[:most]


# ---------------------------------------------------------------- offload (section 5.3)

# The worst batch at HP, 2,048 tokens: 10 ms + 163.84 ms + 20.97 ms. Alone, 640 tokens take 10 +
# 51.2 + 2.05 ms.
WORST_S = 0.010 + 8e-5 * 2048 + 0.5e-8 * 2048**2
OWN_S = 0.010 + 8e-5 * 640 + 0.5e-8 * 640**2


@pytest.mark.parametrize(
    ("left_s", "worst_batches", "leaves"),
    [
        (WORST_S + OWN_S + 0.001, 1.0, False),
        (WORST_S + OWN_S - 0.001, 1.0, True),
        (OWN_S + 0.001, 1.0, True),
        (OWN_S - 0.001, 1.0, False),  # not even an idle HP could
        (WORST_S + OWN_S + 0.001, 1.1, True),
        (OWN_S + 0.001, 0.0, False),
    ],
)
def test_the_threshold_is_the_worst_batch_at_hp_and_the_own_prefill(
    left_s: float, worst_batches: float, leaves: bool
) -> None:
    seen = view([chat(0, target=640, arrived_s=left_s - 1.0)])
    found = offload.urgent(
        seen, Linear(), until_next_s=0.0, batch_tokens=2048, worst_batches=worst_batches
    )
    assert found.tolist() == ([0] if leaves else [])


def test_who_would_become_urgent_during_this_iteration_is_urgent_now() -> None:
    seen = view([chat(0, target=640, arrived_s=WORST_S + OWN_S + 0.1 - 1.0)])
    for until_next_s, found in ((0.09, []), (0.11, [0])):
        assert (
            offload.urgent(
                seen, Linear(), until_next_s=until_next_s, batch_tokens=2048, worst_batches=1.0
            ).tolist()
            == found
        )


def test_a_prompt_longer_than_the_largest_batch_is_predicted_in_its_parts() -> None:
    own_s = WORST_S + 0.010 + 8e-5 * 1024 + 1e-8 * (2048 * 1024 + 1024**2 / 2)
    for off_s, found in ((0.001, []), (-0.001, [0])):
        seen = view([chat(0, target=3072, arrived_s=WORST_S + own_s + off_s - 1.0)])
        assert (
            offload.urgent(
                seen, Linear(), until_next_s=0.0, batch_tokens=2048, worst_batches=1.0
            ).tolist()
            == found
        )


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


def test_only_lp_offloads_and_nobody_twice() -> None:
    full = [decode(chat(i), context=16) for i in range(128)]
    urgent = chat(500, target=640, arrived_s=-0.8)
    for pool in (HP, "", "other"):
        assert planned(ascendra(), at(pool, [*full, urgent]))[1] == []
    assert planned(ascendra(), at(LP, [*full, replace(urgent, offloaded=True)]))[1] == []
    assert planned(ascendra(), at(LP, [*full, replace(urgent, best_effort=True)]))[1] == []


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


# ---------------------------------------------------------------- HP: prefill first, elastic (secti


def test_hp_runs_prefills_alone_in_order_of_arrival_and_then_decodes() -> None:
    made = [decode(chat(i)) for i in range(3)] + [
        chat(7, target=900, arrived_s=-0.2),
        chat(8, target=1500, arrived_s=-0.4),
    ]
    batch, gone = planned(ascendra(), at(HP, made))
    assert list(entries(batch).items()) == [(8, 1500), (7, 548)]
    assert gone == []
    batch, _ = planned(ascendra(), at(HP, made[:3]))
    assert entries(batch) == {0: 1, 1: 1, 2: 1}


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


def test_prefills_begin_at_hp_while_memory_beyond_the_reserve_is_free() -> None:
    made = [chat(i, target=160, arrived_s=i / 64 - 1) for i in range(12)]
    # 10 blocks each, a tenth stays free
    assert len(entries(planned(ascendra(), at(HP, made, capacity=100))[0])) == 9
    assert len(entries(planned(ascendra(reserve=0.0), at(HP, made, capacity=100))[0])) == 10
    alone = [chat(0, target=1520)]
    assert entries(planned(ascendra(), at(HP, alone, capacity=100))[0]) == {0: 1520}
    beside = [decode(chat(1), context=16), *alone]
    assert entries(planned(ascendra(), at(HP, beside, capacity=100))[0]) == {1: 1}


def test_the_batch_of_hp_is_elastic_and_that_of_lp_is_not() -> None:
    made = [decode(chat(i), context=16) for i in range(150)] + [chat(500, target=16)]
    assert 500 in entries(planned(ascendra(), at(HP, made))[0])
    assert 500 not in entries(planned(ascendra(elastic=False), at(HP, made))[0])
    assert 500 not in entries(planned(ascendra(), at(LP, made))[0])


# ---------------------------------------------------------------- overload (section 6.3)


@pytest.mark.parametrize("pool", [LP, HP, ""])
def test_who_still_waits_past_the_deadline_is_relegated_or_dropped_and_nobody_else(
    pool: str,
) -> None:
    made = [
        chat(0, arrived_s=-1.1),
        chat(1, arrived_s=-0.9),
        Row(slot=2, phase=Phase.PREFILL, computed=16, ttft_s=1.0, arrived_s=-5.0),
        summary(3, ttlt_s=1.0, arrived_s=-1.1),
        chat(4, arrived_s=-1.1, best_effort=True),
        decode(chat(5, arrived_s=-9.0)),
        chat(6, generated=3, arrived_s=-9.0),  # preempted
    ]
    batch, gone = planned(ascendra(), at(pool, made))
    assert (list(batch.relegate), list(batch.release), gone) == ([0, 3], [], [])
    batch, _ = planned(ascendra(overload="drop"), at(pool, made))
    assert (list(batch.relegate), list(batch.release)) == ([], [(0, "dropped"), (3, "dropped")])
    assert not {0, 3} & set(entries(batch))


def test_dropping_is_declared_where_it_is_done() -> None:
    assert ascendra(overload="drop").declared.drops
    assert not ascendra().declared.drops


@given(
    seen=seen_views,
    pool=st.sampled_from([LP, HP, ""]),
    overload=st.sampled_from(["drop", "relegate"]),
)
def test_nobody_is_given_up_before_the_deadline(seen: View, pool: str, overload: str) -> None:
    policy = ascendra(overload=overload)
    batch, _ = planned(policy, replace(seen, pool=pool))
    dropped = [slot for slot, why in batch.release if why == "dropped"]
    assert policy.declared.drops or not dropped
    for slot in [*dropped, *batch.relegate]:
        row = row_of(seen, slot)
        assert min(seen.first_due_unix_s[row], seen.last_due_unix_s[row]) < NOW
        assert not seen.best_effort[row]


@given(seen=seen_views, pool=st.sampled_from([LP, HP, ""]))
def test_a_choice_is_good_for_more_than_once_only_while_nobody_waits(seen: View, pool: str) -> None:
    batch, _ = planned(ascendra(), replace(seen, pool=pool))
    assert batch.repeats == 1 or (seen.phase == Phase.DECODE).all()


# ---------------------------------------------------------------- relegated requests: where room is

# A quarter of 150 ms. Linear: 10 ms, 50 us for a decode on 200 tokens, 80 us a prefill token and a
# little attention.
ROOM_S = SHARE_OF_TIME * 0.15


@pytest.mark.parametrize(("prompt_tokens", "runs"), [(0, True), (300, True), (400, False)])
def test_a_relegated_decode_sits_out_where_standard_requests_leave_no_time(
    prompt_tokens: int, runs: bool
) -> None:
    made = [decode(chat(0)), decode(chat(1, best_effort=True))]
    if prompt_tokens:
        made.append(chat(2, target=prompt_tokens))
    batch, _ = planned(ascendra(), at(LP, made))
    assert (1 in entries(batch)) == runs
    assert entries(batch)[0] == 1
    assert entries(batch).get(2, 0) == prompt_tokens


def test_relegated_requests_fill_the_batch_size_and_the_tokens_and_no_more() -> None:
    standard = [decode(chat(i), context=16) for i in range(6)]
    late = [decode(chat(10 + i, best_effort=True, arrived_s=-i), context=16) for i in range(4)]
    batch, _ = planned(ascendra(batch_requests=8), at(LP, [*standard, *late]))
    assert list(entries(batch)) == [*range(6), 13, 12], "the first to arrive"
    batch, _ = planned(ascendra(batch_tokens=7), at(LP, [*standard, *late]))
    assert list(entries(batch)) == [*range(6), 13]


@pytest.mark.parametrize("pool", [LP, HP, ""])
def test_a_relegated_prefill_takes_what_is_left_of_the_time_and_no_turn_from_decodes(
    pool: str,
) -> None:
    made = [decode(chat(0)), chat(1, target=5000, best_effort=True)]
    seen = at(pool, made)
    batch, _ = planned(ascendra(), seen)
    assert list(entries(batch)) == [0, 1]
    shape, tokens = shape_of(seen, batch), entries(batch)[1]
    assert seen.profile.batch_s(shape) <= ROOM_S < seen.profile.batch_s(shape.with_chunk(1, tokens))


@pytest.mark.parametrize("pool", [LP, HP, ""])
def test_relegated_requests_alone_have_all_the_room(pool: str) -> None:
    made = [decode(chat(0, best_effort=True)), chat(1, target=5000, best_effort=True)]
    batch, _ = planned(ascendra(), at(pool, made))
    assert entries(batch) == {0: 1, 1: 2047}


@given(seen=seen_views, pool=st.sampled_from([LP, HP, ""]))
def test_standard_requests_are_served_as_if_no_relegated_request_waited(
    seen: View, pool: str
) -> None:
    """A relegated request that waits holds no KV; without it the batch has the same entries."""
    here = replace(seen, pool=pool)
    waits = seen.best_effort & (seen.phase == Phase.WAITING)
    rows = {f.name: getattr(here, f.name)[~waits] for f in fields(Rows)}
    batch, gone = planned(ascendra(), here)
    alone, gone_alone = planned(ascendra(), replace(here, **rows))
    standard = set(seen.slot[~seen.best_effort].tolist())
    assert {s: n for s, n in entries(batch).items() if s in standard} == {
        s: n for s, n in entries(alone).items() if s in standard
    }
    assert gone == gone_alone


# ---------------------------------------------------------------- the controller: pools, turns and


def offer(name: str = "t.r", **more: object) -> Offer:
    values: dict[str, object] = {
        "key": RequestKey(name),
        "attempt": 1,
        "service_class": ServiceClass.STANDARD,
        "tier": "chat",
        "slo": Slo(ttft_s=1.0, tbt_s=0.15),
        "importance": 1.0,
        "application": "",
        "arrived_unix_s": NOW,
        "prompt_tokens": 100,
        "max_tokens": 100,
    }
    return Offer(**{**values, **more})  # type: ignore[arg-type]


def test_a_ticket_is_good_for_one_and_only_while_nothing_waits_for_prefill() -> None:
    policy, new, moved = ascendra(), offer(), offer("t.o", left="offloaded")

    def accepted(
        made: Sequence[Row], offers: Sequence[Offer], promised: Sequence[Offer] = ()
    ) -> list[bool]:
        return [a.accepted for a in policy.admit(replace(at(HP, made), promised=promised), offers)]

    running = [decode(chat(i)) for i in range(3)]
    assert accepted(running, [new, offer("t.2")]) == [True, False]
    assert accepted(running, [new], promised=[offer("t.0")]) == [False]
    assert accepted([chat(0)], [new]) == [False]
    assert accepted([chat(0, best_effort=True)], [new]) == [True]
    assert accepted([chat(0)], [moved, offer("t.p", left="offloaded")]) == [True, True]
    assert accepted(running, [new, moved]) == [False, True]
    assert accepted(running, [offer("t.l", prompt_tokens=40_000), new]) == [False, True]


@given(
    made=rows(most=6),
    lefts=st.lists(st.sampled_from(["", "offloaded", "drained"]), max_size=8),
    promised=st.integers(0, 1),
)
def test_hp_takes_all_that_were_offloaded_and_at_most_one_other(
    made: list[Row], lefts: list[str], promised: int
) -> None:
    seen = replace(at(HP, made), promised=[offer("t.x")] * promised)
    offers = [offer(f"t.{n}", left=left) for n, left in enumerate(lefts)]
    answers = ascendra().admit(seen, offers)
    others = [a.accepted for a, o in zip(answers, offers, strict=True) if o.left != "offloaded"]
    assert all(a.accepted for a, o in zip(answers, offers, strict=True) if o.left == "offloaded")
    assert sum(others) <= 1
    waits = any(r.phase != Phase.DECODE and not r.best_effort for r in made)
    if promised or waits or "offloaded" in lefts:
        assert not any(others)
    assert all(a.accepted for a in ascendra().admit(replace(seen, pool=LP), offers))


# ---------------------------------------------------------------- the refitted model (section 5.1)


def batches(count: int, seed: int = 1) -> list[BatchShape]:
    rng = Random(seed)
    made = []
    for _ in range(count):
        shape = BatchShape(
            decodes=(n := rng.randrange(128)), decode_context=n * rng.randrange(200, 3000)
        )
        for _ in range(rng.randrange(1, 4)):
            shape = shape.with_chunk(rng.randrange(16, 1500), rng.choice([0, 0, 2000]))
        made.append(shape)
    return made


def learned(of: object, given: object, count: int = 400) -> Refitted:
    model = Refitted()
    model.now(given)  # type: ignore[arg-type]
    for n, shape in enumerate(batches(count)):
        model.observe(shape, of.batch_s(shape), NOW + n)  # type: ignore[attr-defined]
    return model


def test_the_units_are_those_of_the_profile_it_began_with() -> None:
    units = units_of(Linear())
    assert (units.weights_s, units.kv_token_s, units.token_s, units.pair_s) == pytest.approx(
        (0.01003, 1e-7, 8e-5, 1e-8)
    )


def test_coefficients_come_back_from_batches_that_follow_the_form() -> None:
    units = units_of(Linear())
    truth = AscendraProfile(
        "t", 0.4, 0.8, 1.1, 0.002, units.weights_s, units.kv_token_s, units.token_s, units.pair_s
    )
    model = learned(truth, Linear())
    assert model.now(Linear()) is model.fitted
    for shape in batches(50, seed=2):
        assert model.now(Linear()).batch_s(shape) == pytest.approx(truth.batch_s(shape), rel=1e-6)


@pytest.mark.parametrize("name", ["a100-llama3-8b", "h100-llama3-8b", "a100-llama3-70b-tp4"])
def test_the_fit_is_within_ten_percent_of_profiles_of_other_forms(name: str) -> None:
    """Figure 6."""
    truth = store.load(name)
    model = learned(truth, truth)
    off = [
        abs(model.now(truth).batch_s(shape) / truth.batch_s(shape) - 1)
        for shape in batches(200, seed=3)
    ]
    assert model.error < 0.1
    assert np.mean(off) < 0.1


def test_a_machine_that_becomes_slower_is_followed() -> None:
    model = learned(Linear(), Linear())
    for n, shape in enumerate(batches(3000, seed=4)):
        model.observe(shape, 1.5 * Linear().batch_s(shape), NOW + 400 + n)
    shape = BatchShape().with_chunk(1000, 0)
    assert model.now(Linear()).batch_s(shape) == pytest.approx(
        1.5 * Linear().batch_s(shape), rel=0.03
    )


def test_the_own_profile_stands_in_until_enough_was_seen_and_while_the_fit_is_far_off() -> None:
    few = learned(Linear(), Linear(), count=LEAST_BATCHES - 1)
    assert few.fitted is None
    given = Linear()
    assert few.now(given) is given
    model, rng = Refitted(), Random(5)
    model.now(given)
    for n, shape in enumerate(batches(600)):
        model.observe(shape, Linear().batch_s(shape) * rng.choice([0.5, 2.0]), NOW + n)
    assert model.error > 0.1
    assert model.now(given) is given


def test_decodes_alone_teach_nothing() -> None:
    model = learned(Linear(), Linear())
    before = model.fitted
    for n in range(100):
        model.observe(BatchShape(decodes=50, decode_context=9000), 5.0, NOW + 500 + n)
    assert model.fitted == before


def test_the_refitted_model_moves_the_threshold() -> None:
    """The engine is twice as slow as its profile: a request that would have had time is urgent."""
    policy = ascendra()
    seen = at(
        LP,
        [*(decode(chat(i), context=16) for i in range(128)), chat(500, target=640, arrived_s=-0.5)],
    )
    assert planned(policy, seen)[1] == []
    for n, shape in enumerate(batches(400)):
        policy.observe(Observation(NOW + n, shape, 0.0, 2 * Linear().batch_s(shape)))
    assert planned(policy, seen)[1] == [500]


# ---------------------------------------------------------------- a fleet in virtual time

ROOMY, TIGHT = ReplicaFacts(), ReplicaFacts(kv_blocks=1200, max_slots=24)


def drawn(
    rate: float, duration_s: float, seed: int = 1, workload: str = "sharegpt"
) -> list[PlannedRequest]:
    return plan_requests(
        draw_arrivals(Gaps(), rate, duration_s, seed, ((1.0, 1.0),)),
        named_workload(workload, 8192),
        PAPER,
        seed,
    )


def run(
    requests: Sequence[PlannedRequest],
    policy: str = "ascendra",
    replicas: int = 3,
    *,
    settings: Mapping[str, str] | None = None,
    latency: Latency = LATENCIES["none"],
    facts: ReplicaFacts = ROOMY,
    options: RunOptions | None = None,
) -> SimulationResult:
    deployment = Deployment(policy, "a100-llama3-8b", replicas, settings or {}, latency, facts)
    return simulate(Traffic(requests, PAPER), deployment, options)


@pytest.mark.parametrize("name", slow_but(["none"], ["none", "live"]))
@pytest.mark.parametrize("facts", slow_but([TIGHT], [ROOMY, TIGHT]), ids=["roomy", "tight"])
def test_two_lp_and_one_hp_end_every_request_once_and_offload_under_load(
    name: str, facts: ReplicaFacts
) -> None:
    requests = drawn(15.0, 8.0)
    result = run(
        requests,
        latency=LATENCIES[name],
        facts=facts,
        options=RunOptions(keep_times=True, check_every=29),
    )
    assert [v is not None and v.finish_reason for v in result.verdicts] == [
        FinishReason.STOP
    ] * len(requests)
    assert [v and v.output_tokens for v in result.verdicts] == [r.output_tokens for r in requests]
    assert result.offloaded > 0
    served = {v.replica for v in result.verdicts if v is not None}
    assert served == {"r01", "r02", "r03"}


def test_at_low_load_nobody_is_offloaded_and_the_ticket_keeps_hp_busy() -> None:
    requests = drawn(1.5, 40.0, workload="short-mix")
    result = run(requests)
    assert result.offloaded == 0
    assert result.relegated == 0
    assert sum(v is not None and v.replica == "r02" for v in result.verdicts) > len(requests) / 2


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_fleets_of_other_sizes_end_everything_too(replicas: int) -> None:
    requests = drawn(5.0 * replicas, 8.0)
    result = run(requests, replicas=replicas, options=RunOptions(check_every=50))
    assert result.finished == len(requests)


@pytest.mark.slow
def test_dropping_on_overload_ends_the_late_ones_and_serves_more_in_time() -> None:
    """Figure 12, in kind."""
    requests = drawn(16.0, 25.0, seed=2)
    kept, dropped = run(requests), run(requests, settings={"overload": "drop"})
    reasons = [v.finish_reason for v in dropped.verdicts if v is not None]
    assert set(reasons) == {FinishReason.STOP, FinishReason.DROPPED}
    assert len(reasons) == len(requests)
    assert dropped.relegated == 0
    assert dropped.met_fraction > kept.met_fraction


@pytest.mark.parametrize(
    ("policy", "settings"), [("vllm", {"mode": "prefill_first"}), ("fcfs", {"chunk_tokens": "512"})]
)
def test_baselines_that_drop_end_the_late_ones_and_serve_more_in_time(
    policy: str, settings: dict[str, str]
) -> None:
    """Section 8.6 compares with such baselines."""
    requests = drawn(16.0, 20.0, seed=2)
    kept = run(requests, policy, settings=settings)
    dropped = run(requests, policy, settings={**settings, "drop_late": "true"})
    reasons = [v.finish_reason for v in dropped.verdicts if v is not None]
    assert set(reasons) == {FinishReason.STOP, FinishReason.DROPPED}
    assert len(reasons) == len(requests)
    assert dropped.met_fraction > kept.met_fraction


@pytest.mark.slow
def test_under_overload_more_are_served_in_time_than_by_fcfs_with_the_same_batches_and_turns() -> (
    None
):
    requests = drawn(13.0, 30.0, seed=3)
    theirs = run(requests, "fcfs", settings={"chunk_tokens": "2048", "router": "round_robin"})
    assert run(requests).met_fraction > theirs.met_fraction + 0.05
