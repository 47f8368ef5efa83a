"""Tests of vLLM's logprobs, formats, adapters and penalties under our plans, with preemptions."""

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from shared.core.worker.step import Work
from shared.schemas import Sampling
from shared.structured import Choice, Grammar, JsonSchema, Regex, Structured
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot
from tests.services.worker.vllm.conftest import OURS, OUTPUT_TOKENS, Case
from tests.services.worker.vllm.random_plans import GREEDY, Asked, Habits, Play, load, refusal

Cases = Callable[[str], Case]
ROUGH = Habits(quota_tokens=40, preempt=0.08)
TOKENIZER = Tokenizer.load(OURS)
ENDS = frozenset(TOKENIZER.eos_token_ids)


def said(tokens: Sequence[int]) -> str:
    return TOKENIZER.inner.decode(list(tokens))


def run(engine: Any, seed: int, asked: list[Asked], habits: Habits = ROUGH) -> list[list[int]]:
    """The outputs of the requests, in order, under random plans."""
    outputs = Play(engine, Random(seed), habits, caching=True).run(asked)
    return [outputs[n] for n in range(len(asked))]


# ---------------------------------------------------------------- sampling


def test_logprobs_are_vllms_own(caching: Any, case: Cases) -> None:
    known = case("ours")
    asked = [
        Asked(known.prompts[n], OUTPUT_TOKENS, Sampling(temperature=0.0, logprobs=k))
        for n in known.firm
        for k in (3, 0)
    ]
    play = Play(caching, Random(1), ROUGH, caching=True)
    play.run(asked)
    for index, ours in play.logprobs.items():
        n, k = known.firm[index // 2], (3, 0)[index % 2]
        for token, likely, theirs in zip(known.outputs[n], ours, known.logprobs[n], strict=True):
            assert likely.logprob == pytest.approx(theirs[token], abs=1e-4)
            assert [token for token, _ in likely.top] == sorted(
                theirs, key=lambda token: -theirs[token]
            )[:k]
            assert dict(likely.top) == pytest.approx(
                {token: theirs[token] for token, _ in likely.top}, abs=1e-4
            )


def test_a_seeded_request_draws_on_alike_after_preemptions(caching: Any, case: Cases) -> None:
    known = case("ours")
    prompt = known.prompts[-1]
    asked = [
        Asked(prompt, OUTPUT_TOKENS, Sampling(temperature=1.5, top_p=0.99, seed=seed))
        for seed in (1, 2, 3)
        for _ in range(2)
    ]
    smooth = run(caching, 1, asked, Habits(skip=0.0, preempt=0.0, quota_tokens=512))
    assert run(caching, 2, asked) == smooth
    assert smooth[0] == smooth[1]
    assert len({tuple(output) for output in smooth}) == 3


MILD: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": dict.fromkeys(range(100, 400), -100.0)},
]


@pytest.mark.parametrize("params", MILD, ids=lambda params: next(iter(params)))
def test_penalties_and_biases_act_as_under_vllms_own_scheduler(
    caching: Any, case: Cases, params: dict[str, Any]
) -> None:
    from vllm import SamplingParams

    known = case("ours")
    chosen = known.firm[:6]
    theirs = known.llm.generate(
        [{"prompt_token_ids": known.prompts[n]} for n in chosen],
        SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, **params),
        use_tqdm=False,
    )
    ours = run(
        caching,
        4,
        [
            Asked(known.prompts[n], OUTPUT_TOKENS, Sampling(temperature=0.0, **params))
            for n in chosen
        ],
    )
    assert ours == [list(answer.outputs[0].token_ids) for answer in theirs]
    assert ours != [known.outputs[n] for n in chosen]


def test_min_p_leaves_only_what_is_nearly_as_likely_as_the_likeliest(
    caching: Any, case: Cases
) -> None:
    known = case("ours")
    chosen = known.firm[:4]
    hot = run(
        caching,
        5,
        [
            Asked(known.prompts[n], OUTPUT_TOKENS, Sampling(temperature=1.5, min_p=1.0))
            for n in chosen
        ],
    )
    assert hot == [known.outputs[n] for n in chosen]
    assert hot != run(
        caching,
        5,
        [Asked(known.prompts[n], OUTPUT_TOKENS, Sampling(temperature=1.5)) for n in chosen],
    )


@pytest.mark.parametrize("generated", [0, 3])
def test_no_end_is_drawn_before_min_tokens_wherever_they_were_made(
    caching: Any, generated: int
) -> None:
    sampling = Sampling(temperature=0.0, min_tokens=5, logit_bias=dict.fromkeys(ENDS, 100.0))
    load(caching, 0, Asked([9, 10, 11], 9, sampling), [20] * generated)
    output: list[int] = []
    for n in range(7 - generated):
        if n == 1:
            caching.preempt(Slot(0))
        known = 3 + generated + len(output)
        [done] = caching.execute([Work(Slot(0), known if n < 2 else 1, True)], None).done
        output += done.tokens
    caching.release(Slot(0))
    assert not ENDS & set(output[: 5 - generated])
    assert set(output[5 - generated :]) <= ENDS
    assert len(output) == 7 - generated


# ---------------------------------------------------------------- structured output

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog"]},
        "old": {"type": "boolean"},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["animal", "old", "legs"],
    "additionalProperties": False,
}


def fits_schema(text: str) -> bool:
    said = json.loads(text)
    return (
        list(said) == ["animal", "old", "legs"]
        and said["animal"] in ("cat", "dog")
        and said["legs"] in range(10)
    )


FORMATS: list[tuple[Structured, Callable[[str], bool]]] = [
    (JsonSchema(schema=json.dumps(SCHEMA)), fits_schema),
    (
        Choice(options=["certainly", "of course", "never"]),
        lambda text: text in ("certainly", "of course", "never"),
    ),
    (
        Regex(pattern="[a-c]{3}-[0-9]{4}"),
        lambda text: re.fullmatch("[a-c]{3}-[0-9]{4}", text) is not None,
    ),
    (
        Grammar(ebnf='root ::= "yes" | "no" " " root'),
        lambda text: text == "no " * text.count("no") + "yes",
    ),
]


def formatted(case: Case, temperature: float) -> list[Asked]:
    prompts = [case.prompts[n] for n in case.firm]
    return [
        Asked(prompt, 120, Sampling(temperature=temperature, structured=wanted, seed=n), stops=ENDS)
        for n, (prompt, (wanted, _)) in enumerate(zip(prompts, FORMATS * 3, strict=False))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_structured_outputs_are_valid_under_any_plan_and_when_moved(
    caching: Any, case: Cases, seed: int
) -> None:
    """Every second one that is given up is loaded again with the tokens that it has generated."""
    known = case("ours")
    free = [Asked(known.prompts[n], OUTPUT_TOKENS) for n in known.firm[:4]]  # in the same batches
    asked = [*formatted(known, 1.0), *free]
    play = Play(caching, Random(seed), Habits(preempt=0.06, release=0.04), caching=True)
    outputs = play.run(asked)
    assert not play.failed
    whole = 0
    for n, (_, fits) in enumerate(FORMATS * 3):
        if outputs[n] and outputs[n][-1] in ENDS:
            text = said(outputs[n][:-1])
            assert fits(text), text
            whole += 1
    assert whole >= 4
    for n, m in enumerate(known.firm[:4], start=len(FORMATS) * 3):
        assert outputs[n] == known.outputs[m][: len(outputs[n])]


def test_what_a_moved_request_has_generated_is_behind_its_grammar(caching: Any) -> None:
    wanted = Sampling(
        temperature=0.0, structured=Choice(options=["certainly", "of course", "never"])
    )
    asked = Asked(TOKENIZER.encode("Is it?"), 20, wanted, stops=ENDS)
    half = TOKENIZER.encode("nev")
    load(caching, 0, asked, half)
    output: list[int] = []
    while not output or output[-1] not in ENDS:
        known = len(asked.prompt) + len(half)
        [done] = caching.execute([Work(Slot(0), 1 if output else known, True)], None).done
        output += done.tokens
    caching.release(Slot(0))
    assert said([*half, *output[:-1]]) == "never"
    assert "grammar" in refusal(caching, asked, TOKENIZER.encode("perhaps"))


BROKEN = [
    JsonSchema(schema='{"type": "whatever"}'),
    JsonSchema(schema="{"),
    JsonSchema(
        schema='{"type":"object","properties":{"a":{"type":"string","pattern":"a{99999999999}"}},'
        '"patternProperties":{"x":{}}}'
    ),
    Regex(pattern="[a-"),
    Grammar(ebnf="root ::= ("),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: type(broken).__name__)
def test_a_format_that_no_grammar_can_be_made_of_is_refused_and_others_go_on(
    caching: Any, case: Cases, broken: Structured
) -> None:
    known = case("ours")
    n = known.firm[0]
    load(caching, 1, Asked(known.prompts[n], 2))
    assert refusal(caching, Asked([5, 6, 7], 5, Sampling(structured=broken)))
    [done] = caching.execute([Work(Slot(1), len(known.prompts[n]), True)], None).done
    assert list(done.tokens) == known.outputs[n][:1]
    caching.release(Slot(1))
    assert caching.snapshot() == (caching.facts.kv_blocks, [], 0, 0)


@pytest.mark.parametrize("moved", [False, True])
def test_a_grammar_that_breaks_while_it_is_compiled_fails_its_request_alone(
    caching: Any, case: Cases, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    known = case("ours")
    fine = Asked(known.prompts[known.firm[0]], OUTPUT_TOKENS)
    good = Asked(
        [5, 6, 7], 20, Sampling(temperature=0.0, structured=Choice(options=["yes"])), stops=ENDS
    )
    assert said(run(caching, 0, [good])[0][:-1]) == "yes"
    backend = caching._core.structured_output_manager.backend
    compiled = backend.compile_grammar

    def compile_grammar(kind: Any, spec: str, **options: Any) -> Any:
        if "unlucky" in spec:
            raise RuntimeError("it happens")
        return compiled(kind, spec, **options)

    monkeypatch.setattr(backend, "compile_grammar", compile_grammar)
    bad = Asked(
        [5, 6, 7], 20, Sampling(temperature=0.0, structured=Choice(options=["unlucky"])), stops=ENDS
    )
    if moved:
        assert "grammar" in refusal(caching, bad, TOKENIZER.encode("un"))
        return
    play = Play(caching, Random(1), Habits(preempt=0.0), caching=True)
    outputs = play.run([fine, bad, good])
    assert outputs[0] == known.outputs[known.firm[0]]
    assert "grammar" in play.failed.pop(1)
    assert not play.failed
    assert said(outputs[2][:-1]) == "yes"


# ---------------------------------------------------------------- adapters


def test_requests_of_several_adapters_and_of_none_share_batches_and_each_says_its_own(
    caching: Any, case: Cases
) -> None:
    known = case("ours")
    prompts = [known.prompts[n] for n in known.firm[:5]]
    alone = run(caching, 1, [Asked(prompt, OUTPUT_TOKENS, adapter="third") for prompt in prompts])
    mixed = run(
        caching,
        2,
        [
            Asked(prompt, OUTPUT_TOKENS, adapter=name)
            for name in ("", "other", "third")
            for prompt in prompts
        ],
    )
    base, other = ([each[n] for n in known.firm[:5]] for each in (known.outputs, known.others))
    assert mixed == [*base, *other, *alone]
    assert len({str(base), str(other), str(alone)}) == 3


def test_an_adapter_that_was_not_announced_is_refused_by_its_name(caching: Any) -> None:
    assert caching.facts.adapters == ("other", "third")
    assert "nobody" in refusal(caching, Asked([5, 6, 7], 3, GREEDY, "nobody"))


def test_a_grammar_that_is_never_ready_fails_its_request_in_time_and_others_go_on(
    caching: Any, case: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(request: Any) -> None:
        request.structured_output_request.grammar = Future()

    monkeypatch.setattr(caching._core.structured_output_manager, "grammar_init", never)
    known = case("ours")
    n = known.firm[0]
    load(caching, 1, Asked([5, 6, 7], 5, Sampling(structured=Regex(pattern="a+"))))
    load(caching, 2, Asked(known.prompts[n], 2))
    waiting, done = caching.execute(
        [Work(Slot(1), 3, True), Work(Slot(2), len(known.prompts[n]), True)], None
    ).done
    assert (waiting.computed, waiting.failed) == (0, "")
    assert list(done.tokens) == known.outputs[n][:1]
    monkeypatch.setattr("services.worker.engines.vllm.engine.GRAMMAR_S", 0.0)
    caching.preempt(Slot(2))
    failed, done = caching.execute(
        [Work(Slot(1), 3, True), Work(Slot(2), len(known.prompts[n]) + 1, True)], None
    ).done
    assert "grammar" in failed.failed
    assert (done.failed, list(done.tokens)) == ("", known.outputs[n][1:2])
    for slot in (1, 2):
        caching.release(Slot(slot))
