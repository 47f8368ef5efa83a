"""Tests of how our sampling parameters become vLLM's, which must not end an output by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from msgspec import structs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from services.worker.engines.vllm.sampling import sampling_params
from shared.schemas import Sampling
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured

EOS = 2
ALIKE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "seed",
)


def mapped(generated: int = 0, **asked: Any) -> SamplingParams:
    params = sampling_params(Sampling(**asked), max_model_len=512, generated=generated)
    # as the input processor does
    params.update_from_generation_config({"eos_token_id": [EOS, 3]}, EOS)
    return params


def test_neutral_parameters_are_vllms_own_defaults() -> None:
    ours, theirs = mapped(), SamplingParams()
    assert {name: getattr(ours, name) for name in ALIKE} == {
        name: getattr(theirs, name) for name in ALIKE
    }
    assert (ours.logit_bias, ours.structured_outputs) == (
        theirs.logit_bias,
        theirs.structured_outputs,
    )
    assert ours.sampling_type is SamplingType.RANDOM  # no generator of its own, which would be slow


def test_every_parameter_that_draws_arrives() -> None:
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2, "logprobs": 3, "seed": 11,
    }  # fmt: skip
    params = mapped(**asked, logit_bias={5: -1.5}, min_tokens=4)
    assert {name: getattr(params, name) for name in ALIKE} == asked
    assert (params.logit_bias, params.min_tokens, params.sampling_type) == (
        {5: -1.5},
        4,
        SamplingType.RANDOM_SEED,
    )


def test_no_parameter_of_ours_is_forgotten() -> None:
    the_workers_own = {
        "max_tokens", "stop", "ignore_eos", "output_tokens", "thinking_tokens",
        "skip_special_tokens",
    }  # fmt: skip
    passed_on = {*ALIKE, "logit_bias", "min_tokens", "stop_token_ids", "structured"}
    assert passed_on | the_workers_own == {field.name for field in structs.fields(Sampling)}


def test_temperature_zero_is_greedy_and_every_seed_a_seed() -> None:
    assert mapped(temperature=0.0).sampling_type is SamplingType.GREEDY
    assert mapped(seed=-1).sampling_type is SamplingType.RANDOM_SEED  # to vLLM -1 is no seed


def test_vllm_ends_no_output_before_its_context_is_full() -> None:
    params = mapped(max_tokens=1, stop=["x"], stop_token_ids=[7], min_tokens=0)
    for token in (EOS, 3, 7, 9):
        made = SimpleNamespace(
            pooling_params=None, sampling_params=params, output_token_ids=[token] * 20,
            num_tokens=40, num_output_tokens=20,
            max_tokens=params.max_tokens,
        )  # fmt: skip
        assert not check_stop(made, 512)
    assert not params.detokenize


@pytest.mark.parametrize("generated", [0, 2, 5])
def test_ends_of_sequence_and_stop_tokens_are_masked_until_min_tokens(generated: int) -> None:
    params = mapped(generated, min_tokens=4, stop_token_ids=[7])
    output: list[int] = []
    masks = MinTokensLogitsProcessor(None, torch.device("cpu"), False)  # type: ignore[arg-type]
    masks.update_state(
        BatchUpdate(batch_size=1, removed=[], added=[(0, params, [1], output)], moved=[])
    )
    masked = []
    for _ in range(6):
        masked.append(torch.isneginf(masks.apply(torch.zeros(1, 10)))[0].nonzero()[:, 0].tolist())
        output.append(9)
        masks.update_state(None)
    left = max(0, 4 - generated)
    assert masked == [[EOS, 3, 7]] * left + [[]] * (6 - left)


# one that a grammar can be made of, and one that it cannot
FORMATS: list[tuple[Structured, Structured]] = [
    (
        JsonSchema(schema='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        JsonSchema(schema='{"type": "whatever"}'),
    ),
    (Regex(pattern="[a-c]+"), Regex(pattern="[a-")),
    (Grammar(ebnf='root ::= "yes" | "no"'), Grammar(ebnf="root ::= (")),
]


@pytest.mark.parametrize(("good", "bad"), FORMATS)
def test_formats_are_those_that_the_grammar_compiler_takes_and_others_are_refused(
    good: Structured, bad: Structured
) -> None:
    validate_xgrammar_grammar(mapped(structured=good))
    with pytest.raises((ValueError, VLLMClientError)):  # which of them depends on the version
        validate_xgrammar_grammar(mapped(structured=bad))


def test_choices_and_any_object_are_formats_too() -> None:
    for wanted in (Choice(options=["yes", "no"]), JsonObject()):
        validate_xgrammar_grammar(mapped(structured=wanted))
    any_object = mapped(structured=JsonObject()).structured_outputs
    assert any_object is not None
    assert any_object.json_object
