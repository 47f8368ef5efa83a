"""The drafts of each request are as many as the plan says, and do not change the output."""

import re
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from services.worker.engine import Done
from services.worker.engines.vllm_engine import LINGER
from shared.core.turn import Work
from shared.schemas import Sampling
from shared.structured import Regex
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot
from tests.services.worker.vllm.conftest import KV_BLOCKS, OURS, OUTPUT_TOKENS, Case
from tests.services.worker.vllm.random_plans import Asked, Habits, Play, load, speculation

DEPTH = 4
TOKENIZER = Tokenizer.load(OURS)
ENDS = frozenset(TOKENIZER.eos_token_ids)


def decode(engine: Any, depths: list[int]) -> list[Done]:
    """Run one iteration in which slot n verifies so many drafts."""
    work = [Work(Slot(slot), 1 + depth, True) for slot, depth in enumerate(depths)]
    return list(engine.execute(work, speculation(depths) if any(depths) else None).done)


def begin(engine: Any, known: Case, slots: int) -> list[list[int]]:
    for _ in range(LINGER + 1):  # until no state of the test before is left
        engine.execute([], None)
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


def test_each_request_verifies_as_many_drafts_as_its_entry_says(drafting: Any, case: Any) -> None:
    outputs = begin(drafting, case("ours"), 4)
    depths = [4, 2, 1, 0]
    first = decode(drafting, depths)
    assert [done.drafted for done in first] == [0] * 4  # none were made before anybody asked
    for done, output in zip(first, outputs, strict=True):
        output += done.tokens
    for _ in range(4):
        for done, depth, output in zip(decode(drafting, depths), depths, outputs, strict=True):
            assert done.drafted == depth
            assert 1 <= done.computed == len(done.tokens) <= 1 + depth
            output += done.tokens
    # drafts are there for everybody, and belong to who is planned to verify them
    decode(drafting, [0, 0, 0, 4])
    [one, *others] = reversed(decode(drafting, [0, 0, 0, 4]))
    assert (one.drafted, [done.drafted for done in others]) == (4, [0, 0, 0])
    known = case("ours")
    assert [output[:OUTPUT_TOKENS] for output in outputs] == [
        known.outputs[n][: len(outputs[m])] for m, n in enumerate(known.firm[:4])
    ]
    assert len(outputs[0]) > len(outputs[3])
    for slot in range(4):
        drafting.release(Slot(slot))


def test_no_drafts_are_made_when_plans_no_longer_ask_for_them(drafting: Any, case: Any) -> None:
    begin(drafting, case("ours"), 1)
    request = drafting._slots[Slot(0)].request
    decode(drafting, [2])
    assert len(request.spec_token_ids) == 2
    for _ in range(LINGER + 1):
        assert decode(drafting, [0])[0].drafted == 0
    assert request.spec_token_ids == []
    drafting.release(Slot(0))


def test_the_draft_reads_in_iterations_without_drafts_so_only_its_steps_are_announced(
    drafting: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, read = drafting.facts.draft
    assert step > 0 and read == 0, "what it reads is in the profile, which is measured so"
    drafter = drafting._core.model_executor.driver_worker.worker.model_runner.drafter
    tokens, model = list[int](), drafter.model
    begin(drafting, case("ours"), 0)

    def count(**given: Any) -> Any:
        tokens.append(len(given["input_ids"]))
        return model(**given)

    monkeypatch.setattr(drafter, "model", count)
    prompt = case("ours").prompts[0]
    load(drafting, 0, Asked(prompt, OUTPUT_TOKENS))
    drafting.execute([Work(Slot(0), len(prompt), True)], None)
    assert len(tokens) == 1 and tokens[0] >= len(prompt)
    drafting.release(Slot(0))


@pytest.mark.parametrize("end", ["preempt", "release"])
def test_drafts_that_nobody_verified_hold_no_kv(drafting: Any, case: Any, end: str) -> None:
    begin(drafting, case("ours"), 3)
    decode(drafting, [4, 4, 4])
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


def test_a_decode_whose_drafts_do_not_fit_makes_its_one_token(
    drafting: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = drafting.facts.block_tokens
    begin(drafting, case("ours"), 1)
    computed = len(case("ours").prompts[case("ours").firm[0]])
    while computed % size != size - 3:  # room for the newest token and two more
        [done] = decode(drafting, [0])
        computed += done.computed
    no_more = drafting.facts._replace(kv_blocks=-(-computed // size))
    monkeypatch.setattr(drafting, "_facts", no_more)
    [done] = decode(drafting, [4])  # no drafts yet
    assert len(done.tokens) == 1
    [done] = decode(drafting, [4])  # its drafts exist, and would need another block
    assert (done.computed, len(done.tokens), done.drafted) == (1, 1, 0)
    drafting.release(Slot(0))
