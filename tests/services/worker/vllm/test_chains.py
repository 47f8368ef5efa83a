"""Tests of drafts in the vLLM engine: as many as the plan says, and with no effect on outputs."""

import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from msgspec.structs import replace

from services.worker.engine import Done, Outcome
from shared.core.worker.step import Work
from shared.schemas import Sampling
from shared.structured import Regex
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot
from tests.services.worker.vllm.conftest import DRAFT, KV_BLOCKS, OURS, OUTPUT_TOKENS, SLOTS, Case
from tests.services.worker.vllm.random_plans import Asked, Habits, Play, load, speculation

DEPTH = 4
TOKENIZER = Tokenizer.load(OURS)
ENDS = frozenset(TOKENIZER.eos_token_ids)


def iterate(engine: Any, depths: dict[int, int]) -> Outcome:
    """Run one iteration in which these slots verify so many drafts."""
    work = [Work(Slot(slot), 1 + depth, True) for slot, depth in depths.items()]
    wanted = list(depths.values())
    outcome: Outcome = engine.execute(work, speculation(wanted) if any(wanted) else None)
    return outcome


def decode(engine: Any, depths: list[int]) -> list[Done]:
    """Run one iteration in which slot n verifies so many drafts."""
    return list(iterate(engine, dict(enumerate(depths))).done)


def begin(engine: Any, known: Case, slots: int) -> list[list[int]]:
    outputs = []
    for slot in range(slots):
        prompt = known.prompts[known.firm[slot]]
        load(engine, slot, Asked(prompt, OUTPUT_TOKENS))
        [done] = engine.execute([Work(Slot(slot), len(prompt), True)], None).done
        outputs.append(list(done.tokens))
    return outputs


@pytest.mark.parametrize("seed", range(6))
def test_output_with_random_drafts_is_that_without(drafting: Any, case: Any, seed: int) -> None:
    known = case("ours")
    asked = [
        Asked(
            known.prompts[n],
            OUTPUT_TOKENS,
            Sampling(temperature=0.0, logprobs=2 if n % 2 else None),
        )
        for n in known.firm
    ]
    release = 0.02 if seed % 2 else 0.0
    play = Play(
        drafting,
        Random(seed),
        Habits(skip=0.2, preempt=0.04, release=release, depth=DEPTH),
        drafts=True,
    )
    outputs = play.run(asked)
    for index, n in enumerate(known.firm):
        assert outputs[index][:OUTPUT_TOKENS] == known.outputs[n][: len(outputs[index])]
        assert release or len(outputs[index]) >= OUTPUT_TOKENS
        for token, likely, theirs in zip(
            outputs[index], play.logprobs.get(index, ()), known.logprobs[n], strict=False
        ):
            assert likely.logprob == pytest.approx(theirs[token], abs=1e-4)
    assert play.refused_room > 0, "KV was never short"
    assert 0 < play.accepted_tokens < play.drafted_tokens


def test_each_request_verifies_as_many_drafts_as_its_entry_says_from_the_first_plan_on(
    drafting: Any, case: Any
) -> None:
    outputs = begin(drafting, case("ours"), 4)
    for depths in ([4, 2, 1, 0], [4, 2, 1, 0], [1, 0, 4, 3], [0, 0, 0, 4], [2, 2, 2, 2]):
        for done, depth, output in zip(decode(drafting, depths), depths, outputs, strict=True):
            assert done.drafted == depth
            assert 1 <= done.computed == len(done.tokens) <= 1 + depth
            output += done.tokens
    known = case("ours")
    assert [output[:OUTPUT_TOKENS] for output in outputs] == [
        known.outputs[n][: len(outputs[m])] for m, n in enumerate(known.firm[:4])
    ]
    for slot in range(4):
        drafting.release(Slot(slot))


def test_a_request_that_sat_out_the_iteration_before_verifies_drafts_at_once(
    drafting: Any, case: Any
) -> None:
    begin(drafting, case("ours"), 2)
    iterate(drafting, {0: 0})
    assert [done.drafted for done in iterate(drafting, {1: 3}).done] == [3]
    assert [done.drafted for done in iterate(drafting, {0: 2, 1: 1}).done] == [2, 1]
    for slot in range(2):
        drafting.release(Slot(slot))


def test_a_budget_too_short_goes_to_the_drafts_that_paces_need_and_to_decodes_alone(
    drafting: Any, case: Any
) -> None:
    known = case("ours")
    begin(drafting, known, 3)
    prompt = known.prompts[known.firm[3]]
    load(drafting, 3, Asked(prompt, OUTPUT_TOKENS))
    needed = (0.0, 2.0, 4.0)
    work = [Work(Slot(n), 4, True, needed=need) for n, need in enumerate(needed)]
    work.append(Work(Slot(3), len(prompt), True))
    for budget_tokens, drafted in ((7, [0, 1, 3, 0]), (9, [2, 1, 3, 0])):
        short = replace(speculation([3] * 4), budget_tokens=budget_tokens)
        done = drafting.execute(work, short).done
        assert [one.drafted for one in done] == drafted
        work[3] = Work(Slot(3), 1, True)  # a decode that drafts nothing
    for slot in range(4):
        drafting.release(Slot(slot))


def test_the_time_of_drafts_is_told_where_some_are_wanted_and_only_there(
    drafting: Any, case: Any
) -> None:
    begin(drafting, case("ours"), 2)
    for depths in ({0: 0, 1: 0}, {0: 3, 1: 0}, {1: 0}, {1: 1}, {0: 0, 1: 0}):
        outcome = iterate(drafting, depths)
        assert (outcome.drafted_s > 0) == any(depths.values())
        assert outcome.outside_s >= 0
        assert outcome.drafted_s + outcome.outside_s < outcome.exec_s
    for slot in range(2):
        drafting.release(Slot(slot))


def test_the_cost_of_a_step_and_of_reading_is_announced(drafting: Any) -> None:
    step, read = drafting.facts.draft
    assert 0 < step <= 1 and 0 < read <= 1


def test_the_longest_chain_is_announced(drafting: Any) -> None:
    assert drafting.facts.longest_chain == DEPTH


@pytest.fixture
def passes(drafting: Any) -> Iterator[list[int]]:
    """The number of tokens of each pass of the draft model."""
    tokens = list[int]()

    def count(_: Any, args: Any, given: dict[str, Any]) -> None:
        tokens.append(len(given["input_ids"]))

    model = drafter_of(drafting).model
    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    yield tokens
    hook.remove()


def drafter_of(engine: Any) -> Any:
    return engine._core.model_executor.driver_worker.worker.model_runner.drafter


def test_the_draft_model_computes_what_a_plan_wants_and_nothing_else(
    drafting: Any, case: Any, passes: list[int]
) -> None:
    prompts = [len(case("ours").prompts[case("ours").firm[slot]]) for slot in range(2)]
    begin(drafting, case("ours"), 2)
    decode(drafting, [0, 0])
    assert passes == [], "a plan without drafts made some"
    decode(drafting, [3, 0])
    assert passes == [prompts[0] + 2, 1, 1], "the whole of the first request, then two steps"
    passes.clear()
    decode(drafting, [1, 0])
    [tokens] = passes
    assert 2 <= tokens <= 3, "read again"
    passes.clear()
    decode(drafting, [0, 0])
    assert passes == []
    decode(drafting, [2, 2])
    assert passes[0] >= prompts[1] + 4, "the second request was read with the first"
    assert passes[1:] == [2]
    for slot in range(2):
        drafting.release(Slot(slot))


Expected = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def alone() -> Expected:
    """The greedy tokens of the draft model under transformers, so many behind a text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)

    def greedy(text: list[int], tokens: int) -> list[int]:
        for _ in range(tokens):
            with torch.inference_mode():
                logits = model(torch.tensor([text])).logits[0, -1]
            text = [*text, int(logits.argmax())]
        return text[-tokens:]

    return greedy


def matches(text: list[int], tokens: int) -> list[int]:
    """The tokens behind the first occurrence of the text's longest n-gram, n at most 2."""
    for n in (2, 1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + tokens]
    return []


class Compared:
    """Compares the drafts that vLLM's scheduler is given with those expected."""

    def __init__(self, engine: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
        self._scheduler, self._expected = engine._scheduler, expected
        self._take = engine._scheduler.update_draft_token_ids
        self.drafts = 0
        monkeypatch.setattr(engine._scheduler, "update_draft_token_ids", self.take)

    def take(self, given: Any) -> None:
        for name, drafts in zip(given.req_ids, given.draft_token_ids, strict=False):
            text = list(self._scheduler.requests[name].all_token_ids)
            assert drafts == self._expected(text, max(1, len(drafts)))
            self.drafts += len(drafts)
        self._take(given)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_the_draft_models_own_tokens_after_whatever_came_before(
    drafting: Any, case: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Accepted and rejected drafts, iterations without any, preemptions and blocks of others."""
    known = case("ours")
    compared = Compared(drafting, alone, monkeypatch)
    asked = [Asked(known.prompts[n], OUTPUT_TOKENS) for n in known.firm[:SLOTS]]
    habits = Habits(skip=0.3, preempt=0.05, release=0.02, depth=DEPTH)
    Play(drafting, Random(50 + seed), habits, drafts=True).run(asked)
    assert compared.drafts > 100


def test_a_text_longer_than_a_pass_is_read_in_several(
    drafting: Any, case: Any, alone: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_of(drafting), "max_num_tokens", 16)
    compared = Compared(drafting, alone, monkeypatch)
    prompt = [7 + n % 900 for n in range(40)]
    for slot in range(2):
        load(drafting, slot, Asked(prompt[slot:], OUTPUT_TOKENS))
        drafting.execute([Work(Slot(slot), len(prompt) - slot, True)], None)
    assert [done.drafted for done in decode(drafting, [2, 2])] == [2, 2]
    assert max(passes) <= 16 and compared.drafts == 4
    for slot in range(2):
        drafting.release(Slot(slot))


def test_drafts_are_the_draft_models_own_behind_a_cached_prefix(
    drafting_and_caching: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM finds the target's KV of a prompt; the draft model has read it or has not."""
    engine = drafting_and_caching
    compared = Compared(engine, alone, monkeypatch)
    prompt = [7 + n % 900 for n in range(100)]
    for slot, depth in enumerate((0, 3, 3)):
        load(engine, slot, Asked(prompt, OUTPUT_TOKENS))
        [done] = engine.execute([Work(Slot(slot), 100, True)], None).done
        assert done.cached == (96 if slot else 0)
        for _ in range(3):
            iterate(engine, dict.fromkeys(range(slot + 1), depth))
    assert compared.drafts == 3 * (2 + 3) * 3
    for slot in range(3):
        engine.release(Slot(slot))


@pytest.mark.parametrize("end", ["preempt", "release"])
def test_drafts_that_nobody_verified_hold_no_kv(drafting: Any, case: Any, end: str) -> None:
    begin(drafting, case("ours"), 3)
    decode(drafting, [4, 4, 4])
    for slot in range(3):
        drafting.preempt(Slot(slot)) if end == "preempt" else drafting.release(Slot(slot))
    assert drafting.snapshot().free_blocks == drafting.facts.kv_blocks == KV_BLOCKS
    if end == "preempt":
        for slot in range(3):
            drafting.release(Slot(slot))
    assert drafting.snapshot().slots == []


def test_seeded_requests_go_on_beside_speculation(drafting: Any, case: Any) -> None:
    """Draws depend on the number of drafts: they are the same only under equal plans."""
    known = case("ours")
    asked = [
        Asked(known.prompts[-1 - n], OUTPUT_TOKENS, Sampling(temperature=1.2, seed=n))
        for n in range(4)
    ]
    outputs = [
        Play(drafting, Random(3), Habits(depth=DEPTH), drafts=True).run(asked) for _ in range(2)
    ]
    assert all(len(output) >= OUTPUT_TOKENS for each in outputs for output in each.values())


def test_drafts_keep_to_the_grammar(drafting: Any, case: Any) -> None:
    known = case("ours")
    wanted = Sampling(temperature=0.0, structured=Regex(pattern="[a-c]{3}-[0-9]{12}"))
    asked = [Asked(known.prompts[n], OUTPUT_TOKENS, wanted, stops=ENDS) for n in known.firm[:6]]
    play = Play(drafting, Random(2), Habits(skip=0.1, preempt=0.04, depth=DEPTH), drafts=True)
    outputs = play.run(asked)
    assert not play.failed
    for output in outputs.values():
        end = next(n for n, token in enumerate(output) if token in ENDS)
        text = TOKENIZER.inner.decode(output[:end])
        assert re.fullmatch("[a-c]{3}-[0-9]{12}", text), text
    assert play.drafted_tokens > 0


def test_a_decode_whose_drafts_do_not_fit_makes_its_one_token_and_none_are_drafted(
    drafting: Any, case: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = drafting.facts.block_tokens
    begin(drafting, case("ours"), 1)
    computed = len(case("ours").prompts[case("ours").firm[0]])
    while computed % size != size - 3:  # room for the newest token and two more
        [done] = decode(drafting, [0])
        computed += done.computed
    no_more = drafting.facts._replace(kv_blocks=-(-computed // size))
    monkeypatch.setattr(drafting, "_facts", no_more)
    outcome = iterate(drafting, {0: 4})  # its drafts would need another block
    [done] = outcome.done
    assert (done.computed, len(done.tokens), done.drafted) == (1, 1, 0)
    assert passes == [] and outcome.drafted_s == 0.0, "drafted for nothing"
    [done] = decode(drafting, [1])
    assert done.drafted == 1 and len(passes) == 1, "these fit"
    drafting.release(Slot(0))


def test_of_two_decodes_with_room_for_the_drafts_of_one_only_the_first_is_drafted_for(
    drafting: Any, case: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    size, known = drafting.facts.block_tokens, case("ours")
    begin(drafting, known, 2)
    computed = [len(known.prompts[n]) for n in known.firm[:2]]
    for slot in range(2):
        while computed[slot] % size != size - 3:
            [done] = iterate(drafting, {slot: 0}).done
            computed[slot] += done.computed
    blocks = sum(-(-tokens // size) for tokens in computed)
    monkeypatch.setattr(drafting, "_facts", drafting.facts._replace(kv_blocks=blocks + 1))
    assert [done.drafted for done in iterate(drafting, {1: 4, 0: 4}).done] == [4, 0]
    assert passes == [computed[1] + 1, 1, 1, 1], "the second request was drafted for"
    for slot in range(2):
        drafting.release(Slot(slot))
