"""Tests of vLLM's prefix cache: a prefix found there costs nothing, is reported, and is taken only
if it fits into the KV blocks that Slackline counts.
"""

from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from shared.core.worker.step import Work
from shared.prefix import chain_of
from shared.vocabulary import Slot
from tests.services.worker.vllm.conftest import OUTPUT_TOKENS, SLOTS
from tests.services.worker.vllm.random_plans import Asked, Habits, Held, Play, load

BLOCK = 32
PROMPT = [7 + n * n % 997 for n in range(100)]  # three whole blocks, and four tokens more


def fill(engine: Any, prompt: list[int], slot: int = 0) -> None:
    """Compute the prompt and release the request: the blocks stay in the cache."""
    load(engine, slot, Asked(prompt, 1))
    [done] = engine.execute([Work(Slot(slot), len(prompt), True)], None).done
    assert len(done.tokens) == 1
    engine.release(Slot(slot))


@pytest.mark.parametrize(("asked", "computed"), [(1, 97), (4, 100), (50, 100), (100, 100)])
def test_a_prompt_that_was_computed_before_is_further_than_asked_and_says_what_was_cached(
    caching: Any, asked: int, computed: int
) -> None:
    fill(caching, PROMPT)
    load(caching, 0, Asked(PROMPT, 1))
    [done] = caching.execute([Work(Slot(0), asked, asked == 100)], None).done
    assert (done.computed, done.cached, len(done.tokens)) == (
        computed,
        3 * BLOCK,
        int(computed == 100),
    )
    caching.release(Slot(0))


def test_whoever_shares_a_beginning_shares_its_blocks_and_a_preempted_request_finds_its_own(
    caching: Any,
) -> None:
    fill(caching, PROMPT)
    for slot in (0, 1):
        load(caching, slot, Asked([*PROMPT[:64], 5 + slot, 9], 1))
    done = caching.execute([Work(Slot(0), 10, False), Work(Slot(1), 10, False)], None).done
    assert [(one.computed, one.cached) for one in done] == [(66, 64), (66, 64)]
    assert caching.snapshot().free_blocks == caching.facts.kv_blocks - 4  # two shared, one each
    caching.preempt(Slot(1))
    [again] = caching.execute([Work(Slot(1), 67, True)], None).done
    assert (again.computed, again.cached, len(again.tokens)) == (67, 64, 1)
    for slot in (0, 1):
        caching.release(Slot(slot))
    assert caching.snapshot() == (caching.facts.kv_blocks, [], 0, 0)


def test_an_adapter_finds_nothing_of_the_model_itself(caching: Any) -> None:
    fill(caching, PROMPT)
    load(caching, 0, Asked(PROMPT, 1, adapter="other"))
    [done] = caching.execute([Work(Slot(0), 100, True)], None).done
    assert (done.computed, done.cached) == (100, 0)
    caching.release(Slot(0))


def test_the_engine_says_which_prefixes_it_keeps_until_their_blocks_are_needed(
    caching: Any,
) -> None:
    chain = chain_of(PROMPT, b"mine")
    load(caching, 0, Asked(PROMPT, 1), salt=b"mine")
    outcome = caching.execute([Work(Slot(0), len(PROMPT), True)], None)
    assert list(outcome.prefixes.kept) == list(chain[:1])  # 64 tokens; the whole prompt has 100
    caching.release(Slot(0))
    rng, dropped = Random(2), list[int]()
    while not set(chain[:1]) <= set(dropped):  # other prompts need its blocks
        other = [rng.randrange(5, 2000) for _ in range(8 * BLOCK)]
        load(caching, 0, Asked(other, 1))
        outcome = caching.execute([Work(Slot(0), len(other), True)], None)
        dropped += outcome.prefixes.dropped
        caching.release(Slot(0))


def test_an_engine_that_restarts_has_forgotten_all_prefixes(caching: Any) -> None:
    fill(caching, PROMPT)
    load(caching, 0, Asked(PROMPT, 1))
    caching.restart()
    assert caching.snapshot() == (caching.facts.kv_blocks, [], 0, 0)
    load(caching, 0, Asked(PROMPT, 1))
    outcome = caching.execute([Work(Slot(0), len(PROMPT), True)], None)
    assert outcome.done[0].cached == 0
    assert list(outcome.prefixes.kept) == list(chain_of(PROMPT)[:1])
    caching.release(Slot(0))


def test_tenants_that_do_not_share_find_nothing_of_each_other(caching: Any) -> None:
    for salt, cached in ((b"hers", 0), (b"yours", 0), (b"hers", 3 * BLOCK)):
        load(caching, 0, Asked(PROMPT, 1), salt=salt)
        [done] = caching.execute([Work(Slot(0), 100, True)], None).done
        assert done.cached == cached
        caching.release(Slot(0))


def test_hits_for_which_the_books_have_no_room_are_not_taken(caching: Any) -> None:
    """They would be blocks of a request that are not counted: the next request would not find the
    room that it was promised.
    """
    rng = Random(1)
    long = [rng.randrange(5, 2000) for _ in range(8 * BLOCK)]
    fill(caching, long)
    play = Play(caching, rng, caching=True)
    others = [[rng.randrange(5, 2000) for _ in range(9 * BLOCK)] for _ in range(2)]
    for slot, prompt in enumerate([*others, [*long, 3]]):
        play.held[slot] = Held(slot, Asked(prompt, 1), [])
        load(caching, slot, Asked(prompt, 1))
    for slot in (0, 1):
        play.iterate([Work(Slot(slot), 9 * BLOCK, True)], [0])
    assert caching.snapshot().free_blocks == 6  # its eight blocks do not fit beside the others
    [done] = play.iterate([Work(Slot(2), 10, False)], [0])
    assert (done.computed, done.cached) == (10, 0)
    for slot in range(3):
        caching.release(Slot(slot))
    assert caching.snapshot() == (caching.facts.kv_blocks, [], 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_outputs_are_the_same_whatever_is_found_in_the_cache(
    caching: Any, case: Any, seed: int
) -> None:
    known = case("ours")
    asked = [
        Asked(known.prompts[n], OUTPUT_TOKENS, adapter=adapter)
        for n in known.firm
        for adapter in ("", "", "other")
    ]
    play = Play(caching, Random(seed), Habits(preempt=0.05, release=0.02), caching=True)
    outputs = play.run(asked)
    wanted = [each[n] for n in known.firm for each in (known.outputs, known.outputs, known.others)]
    for n, output in outputs.items():
        assert output == wanted[n][: len(output)]
    assert play.cached_tokens > 0
    assert len(asked) > SLOTS
    assert any(known.outputs[n] != known.others[n] for n in known.firm)
