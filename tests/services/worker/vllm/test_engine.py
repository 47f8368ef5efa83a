"""Tests of the vLLM engine: under our plans it makes the tokens that vLLM's own scheduler makes."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from shared.core.worker.step import Work
from shared.vocabulary import Slot
from tests.services.worker.vllm.conftest import KV_BLOCKS, OUTPUT_TOKENS, Case
from tests.services.worker.vllm.random_plans import Asked, Habits, Play, load, vllms_own_books

MODELS = ("ours", "small")
Cases = Callable[[str], Case]
Engines = Callable[[str], Any]


def requests(case: Case) -> list[Asked]:
    return [Asked(case.prompts[n], OUTPUT_TOKENS) for n in case.firm]


def expected(case: Case) -> list[list[int]]:
    return [case.outputs[n] for n in case.firm]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_output_under_random_plans_is_that_of_vllms_own_scheduler(
    plain: Engines, case: Cases, model: str, seed: int
) -> None:
    asked = requests(case(model))
    play = Play(plain(model), Random(seed))
    outputs = play.run(asked)
    assert [outputs[n] for n in range(len(asked))] == expected(case(model))
    assert play.refused_room > 0, "KV was never short"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_what_is_given_up_in_the_middle_leaves_nothing_and_goes_on_alike_elsewhere(
    plain: Engines, case: Cases, model: str, seed: int
) -> None:
    asked = requests(case(model))
    play = Play(
        plain(model), Random(100 + seed), Habits(quota_tokens=40, preempt=0.05, release=0.03)
    )
    outputs = play.run(asked)
    for n, output in enumerate(expected(case(model))):
        assert outputs[n] == output[: len(outputs[n])]
    assert 0 < sum(len(output) == OUTPUT_TOKENS for output in outputs.values()) < len(asked)


def test_a_plan_without_room_does_what_fits_and_says_so_and_the_rest_goes_on_later(
    plain: Engines,
) -> None:
    engine = plain("ours")
    rng = Random(3)
    prompts = [
        [rng.randrange(5, 2000) for _ in range(length)]
        for length in (10 * 32, 10 * 32, 4 * 32 + 1, 32)
    ]
    for slot, prompt in enumerate(prompts):
        load(engine, slot, Asked(prompt, 1))
    work = [Work(Slot(slot), len(prompt), True) for slot, prompt in enumerate(prompts)]
    done = engine.execute(work, None).done
    # of 24 blocks 20 are taken first; the third asks for five
    assert [one.computed for one in done] == [320, 320, 0, 32]
    assert [len(one.tokens) for one in done] == [1, 1, 0, 1]
    assert engine.snapshot().free_blocks == 3
    done = engine.execute([Work(Slot(2), 96, False)], None).done  # what fits of it
    assert (done[0].computed, engine.snapshot().free_blocks) == (96, 0)
    done = engine.execute([Work(Slot(slot), 1, slot != 2) for slot in range(4)], None).done
    assert [one.computed for one in done] == [0, 0, 0, 0]
    engine.release(Slot(0))
    done = engine.execute([Work(Slot(slot), 1, slot != 2) for slot in (1, 2, 3)], None).done
    assert [one.computed for one in done] == [1, 1, 1]
    assert engine.snapshot().free_blocks == KV_BLOCKS - (11 + 4 + 2)
    assert not any(state.request.num_preemptions for state in engine._slots.values())
    for slot in (1, 2, 3):
        engine.release(Slot(slot))
    assert engine.snapshot() == (KV_BLOCKS, [], 0, 0)


def test_requests_leave_at_any_point_and_their_blocks_with_them(plain: Engines) -> None:
    """Release requests never planned, in the middle of the prompt, preempted and decoding: the next
    request of the slot is another.
    """
    engine, prompt = plain("ours"), [7 + n % 900 for n in range(100)]
    for _ in range(3):
        for slot in range(4):
            load(engine, slot, Asked(prompt, 5))
        engine.execute(
            [Work(Slot(1), 40, False), Work(Slot(2), 40, False), Work(Slot(3), 100, True)], None
        )
        engine.preempt(Slot(2))
        engine.preempt(Slot(0))  # has nothing: nothing happens
        assert engine.snapshot() == (KV_BLOCKS - 2 - 4, [0, 1, 2, 3], 0, 0)
        for slot, free in ((0, 18), (1, 20), (2, 20), (3, 24)):
            engine.release(Slot(slot))
            assert engine.snapshot().free_blocks == free
    assert vllms_own_books(engine) == (0, 0, 0)


def test_an_iteration_without_work_is_none(plain: Engines) -> None:
    outcome = plain("ours").execute([], None)
    assert (outcome.done, plain("ours").snapshot()) == ([], (KV_BLOCKS, [], 0, 0))


def test_durations_tell_the_model_from_what_is_around_it(plain: Engines) -> None:
    engine = plain("ours")
    load(engine, 0, Asked([7] * 200, 5))
    outcome = engine.execute([Work(Slot(0), 200, True)], None)
    assert 0 < outcome.outside_s < outcome.exec_s
    engine.release(Slot(0))


def test_misuse_is_a_bug_and_ends_the_process(plain: Engines) -> None:
    engine = plain("ours")
    load(engine, 0, Asked([7] * 20, 5))
    misuses: list[Callable[[], object]] = [
        lambda: load(engine, 0, Asked([7], 1)),
        lambda: load(engine, 1, Asked([7] * 513, 1)),
        lambda: load(engine, 1, Asked([], 1), [7]),
        lambda: engine.execute([Work(Slot(0), 5, False), Work(Slot(0), 5, False)], None),
    ]
    for misuse in misuses:
        with pytest.raises(AssertionError):
            misuse()
    unknown = Slot(1)
    for call in (
        engine.release,
        engine.preempt,
        lambda slot: engine.execute([Work(slot, 1, True)], None),
    ):
        with pytest.raises(KeyError):
            call(unknown)
    engine.release(Slot(0))
    assert engine.snapshot() == (KV_BLOCKS, [], 0, 0)
