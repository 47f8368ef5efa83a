"""Tests of the policy `vllm`: whole prompts before decodes or chunks beside them, its two limits,
preemption, and drafts for every decode.
"""

from dataclasses import replace

import pytest
from hypothesis import given

from shared.errors import ConfigError
from shared.perf.draft import Draft
from shared.policy import registry
from shared.policy.seam import Choice, Phase, View
from tests.shared.policy.views import Linear, Row, decode, entries, view, views

MODES = ("chunked", "prefill_first")


def plan(seen: View, **words: object) -> Choice:
    (choice,) = registry.make("vllm", {key: str(value) for key, value in words.items()}).plan(seen)
    return choice


def decodes(n: int, context: int = 200) -> list[Row]:
    return [decode(Row(slot=slot, arrived_s=-10 - slot), context=context) for slot in range(n)]


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


# ---------------------------------------------------------------- limits


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


# ---------------------------------------------------------------- served
