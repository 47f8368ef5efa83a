"""The policy `vllm`: whole prompts before decodes or chunks beside them, its two limits,
preemption, and drafts for every decode.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared.errors import ConfigError
from shared.perf.draft import Draft
from shared.policy import registry
from shared.policy.seam import Choice, Phase, View
from shared.rules.tiers import load_tiers
from tests.shared.policy.views import BLOCK, Linear, Row, decode, entries, view, views

MODES = ("chunked", "prefill_first")


def plan(seen: View, **words: object) -> Choice:
    (choice,) = registry.make("vllm", {key: str(value) for key, value in words.items()}).plan(seen)
    return choice


def decodes(n: int, context: int = 200) -> list[Row]:
    return [decode(Row(slot=slot, arrived_s=-10 - slot), context=context) for slot in range(n)]


def phases(seen: View, choice: Choice) -> set[Phase]:
    at = {slot: i for i, slot in enumerate(seen.slot.tolist())}
    return {Phase(seen.phase[at[slot]]) for slot in entries(choice)}


# ---------------------------------------------------------------- prefill first


def test_prompts_go_whole_and_alone_while_one_waits_and_decodes_when_none_does() -> None:
    waiting = [Row(slot=8, target=700, arrived_s=-2), Row(slot=9, target=900, arrived_s=-1)]
    assert entries(plan(view([*decodes(3), *waiting]), mode="prefill_first")) == {8: 700, 9: 900}
    assert entries(plan(view(decodes(3)), mode="prefill_first")) == {0: 1, 1: 1, 2: 1}


def test_a_prompt_that_passes_the_token_limit_waits_for_the_next_iteration_whole() -> None:
    rows = [Row(slot=slot, target=900, arrived_s=slot - 10.0) for slot in range(4)]
    words = {"mode": "prefill_first", "max_num_batched_tokens": 2048}
    assert entries(plan(view(rows), **words)) == {0: 900, 1: 900}
    assert entries(plan(view([Row(target=5000)]), **words)) == {0: 5000}, (
        "one that is longer than the limit runs alone"
    )


def test_shortest_job_first_goes_by_the_prompt_among_those_that_have_not_begun() -> None:
    rows = [
        Row(slot=slot, target=target, arrived_s=slot - 10.0)
        for slot, target in enumerate((900, 400, 1200, 400))
    ]
    words = {"mode": "prefill_first", "max_num_batched_tokens": 1700}
    assert list(entries(plan(view(rows), order="sjf", **words))) == [1, 3, 0]
    assert list(entries(plan(view(rows), **words))) == [0, 1]
    begun = [Row(slot=8, phase=Phase.PREFILL, target=2000, computed=100), *rows]
    assert next(iter(entries(plan(view(begun), order="sjf")))) == 8


@given(seen=views)
def test_prefill_first_never_mixes_and_never_cuts_a_prompt_short(seen: View) -> None:
    choice = plan(seen, mode="prefill_first")
    at = {slot: i for i, slot in enumerate(seen.slot.tolist())}
    planned = entries(choice)
    assert len({seen.phase[at[slot]] == Phase.DECODE for slot in planned}) <= 1
    for slot, cap in planned.items():
        if seen.phase[at[slot]] == Phase.WAITING:
            assert cap == seen.target_tokens[at[slot]]


def test_prompts_leave_the_watermark_free_unless_one_needs_everything() -> None:
    prompt = Row(slot=5, target=95 * BLOCK, arrived_s=-1)
    busy = view([*decodes(1, context=4 * BLOCK), prompt], capacity=100)
    assert entries(plan(busy, mode="prefill_first")) == {5: 95 * BLOCK}
    longer = Row(slot=5, target=96 * BLOCK, arrived_s=-1)
    assert entries(
        plan(view([*decodes(1, context=4 * BLOCK), longer], capacity=100), mode="prefill_first")
    ) == {0: 1}
    assert entries(plan(view([Row(target=100 * BLOCK)], capacity=100), mode="prefill_first")) == {
        0: 100 * BLOCK
    }


# ---------------------------------------------------------------- chunked


def test_chunked_runs_all_decodes_and_fills_up_with_prompts_as_they_arrived() -> None:
    rows = [
        *decodes(48),
        Row(slot=60, target=1500, arrived_s=-3),
        Row(slot=61, target=1500, arrived_s=-2),
    ]
    planned = entries(plan(view(rows)))
    assert {slot: cap for slot, cap in planned.items() if slot >= 60} == {60: 1500, 61: 500}
    assert sum(planned.values()) == 2048


def test_a_prefill_that_has_begun_goes_on_before_one_that_was_preempted_and_came_earlier() -> None:
    rows = [
        Row(slot=1, target=4000, arrived_s=-9),
        Row(slot=2, phase=Phase.PREFILL, target=3000, computed=1600, arrived_s=-4),
    ]
    assert entries(plan(view(rows))) == {2: 1400, 1: 648}


def test_nobody_begins_in_an_iteration_that_preempts() -> None:
    rows = [*decodes(2, context=10 * BLOCK), Row(slot=7, target=16, arrived_s=-99)]
    choice = plan(view(rows, free=0))
    assert list(choice.preempt) == [0], "the latest arrived"
    assert entries(choice) == {1: 1}


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("mode", MODES)
@given(seen=views, most=st.integers(1, 12))
def test_no_more_requests_run_than_max_num_seqs_allows_to_begin(
    mode: str, seen: View, most: int
) -> None:
    running = int(np.count_nonzero(seen.phase != Phase.WAITING))
    at = {slot: i for i, slot in enumerate(seen.slot.tolist())}
    planned = entries(plan(seen, mode=mode, max_num_seqs=most))
    begun = sum(seen.phase[at[slot]] == Phase.WAITING for slot in planned)
    assert begun <= max(0, most - running)


def test_a_token_limit_that_cannot_hold_a_token_of_each_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="max_num_batched_tokens 128 is less than max_num_seqs 256"
    ):
        registry.make("vllm", {"max_num_batched_tokens": "128"})


# ---------------------------------------------------------------- drafts


def drafting(rows: list[Row], free: int | None = None) -> View:
    return replace(view(rows, free=free), draft=Draft(Linear(), 0.05, 0.05))


@pytest.mark.parametrize("mode", MODES)
def test_every_decode_drafts_in_line_and_prefills_do_not(mode: str) -> None:
    rows = (
        decodes(3)
        if mode == "prefill_first"
        else [*decodes(3), Row(slot=9, target=5000, arrived_s=-1)]
    )
    choice = plan(drafting(rows), mode=mode, spec_tokens=4)
    planned, speculation = entries(choice), choice.speculation
    assert speculation is not None
    assert speculation.method == "chain"
    assert [planned[slot] for slot in range(3)] == [5, 5, 5]
    assert speculation.depth.tolist() == [4, 4, 4, 0][: len(planned)]
    assert speculation.budget_tokens == 15
    if mode == "chunked":
        assert planned[9] == 2048 - 15, "verified tokens count as batched ones"


def test_nobody_drafts_past_the_end_of_its_output() -> None:
    rows = [
        decode(Row(slot=slot, max_tokens=5 + left), generated=5)
        for slot, left in enumerate((1, 2, 9))
    ]
    choice = plan(drafting(rows), spec_tokens=4)
    assert entries(choice) == {0: 1, 1: 2, 2: 5}
    assert choice.speculation is not None
    assert choice.speculation.depth.tolist() == [0, 1, 4]


def test_without_a_draft_model_or_room_for_drafts_decodes_run_as_ever() -> None:
    full = decodes(3, context=10 * BLOCK - 1)  # a token each still fits their blocks
    for seen in (view(decodes(3)), drafting(full, free=2)):
        choice = plan(seen, spec_tokens=4)
        assert choice.speculation is None
        assert set(entries(choice).values()) == {1}
    assert plan(drafting(full, free=3), spec_tokens=4).speculation is not None


# ---------------------------------------------------------------- served


@pytest.mark.parametrize("mode", MODES)
def test_a_burst_is_served_to_the_end_under_memory_pressure(mode: str) -> None:
    requests = [PlannedRequest(n, n / 64, 1500, 400, "Q1", 1.0, "default", "") for n in range(60)]
    # 60 x 1,900 tokens do not fit at once: some are preempted, all are served.
    result = simulate(
        Traffic(requests, load_tiers("qoserve-3")),
        Deployment("vllm", "a100-llama2-7b", settings={"mode": mode}),
    )
    assert all(verdict is not None and verdict.output_tokens == 400 for verdict in result.verdicts)
    assert result.preempted > 0


def test_prefill_first_gives_earlier_first_tokens_and_longer_pauses_than_chunks() -> None:
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.2, 100)).tolist()
    requests = [
        PlannedRequest(n, at_s, 1500, 200, "Q1", 1.0, "default", "")
        for n, at_s in enumerate(arrivals)
    ]
    made = {
        mode: simulate(
            Traffic(requests, load_tiers("qoserve-3")),
            Deployment(
                "vllm",
                "a100-llama3-8b",
                settings={"mode": mode, "max_num_batched_tokens": "512"},
            ),
        )
        for mode in MODES
    }
    ttft_s = {
        mode: np.mean([v.ttft_s for v in result.verdicts if v is not None and v.ttft_s is not None])
        for mode, result in made.items()
    }
    worst_s = {
        mode: np.mean(
            [v.worst_tbt_s for v in result.verdicts if v is not None and v.worst_tbt_s is not None]
        )
        for mode, result in made.items()
    }
    assert ttft_s["prefill_first"] < ttft_s["chunked"]
    assert worst_s["prefill_first"] > 2 * worst_s["chunked"]
