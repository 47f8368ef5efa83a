"""Turns our sampling parameters into vLLM's. The worker decides where an output ends, so vLLM gets
no limit, stop string or end of sequence, but the tokens not to draw before `min_tokens`.
"""

from typing import assert_never

from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from shared.schemas import Sampling
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured

UNSEEDED = -1  # vLLM treats this seed as none
STAND_IN_SEED = 2**63 - 1  # the seed that draws instead


def sampling_params(
    sampling: Sampling, *, max_model_len: int, generated: int = 0
) -> SamplingParams:
    """vLLM's parameters for a request whose `generated` tokens count as prompt. Raises
    VLLMClientError for values that vLLM refuses. A request without a seed gets none: a
    generator for each row is slow. vLLM adds the model's own ends to what `min_tokens` masks.
    """
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=STAND_IN_SEED if sampling.seed == UNSEEDED else sampling.seed,
        logprobs=sampling.logprobs,
        min_tokens=min(max(0, sampling.min_tokens - generated), max_model_len),
        max_tokens=max_model_len,
        ignore_eos=True,
        detokenize=False,
        structured_outputs=None
        if sampling.structured is None
        else _structured(sampling.structured),
    )
    # Not `stop_token_ids`: the scheduler would end the request there.
    params._all_stop_token_ids.update(sampling.stop_token_ids)
    return params


def _structured(wanted: Structured) -> StructuredOutputsParams:
    match wanted:
        case JsonSchema(schema=schema):
            return StructuredOutputsParams(json=schema)
        case JsonObject():
            return StructuredOutputsParams(json_object=True)
        case Regex(pattern=pattern):
            return StructuredOutputsParams(regex=pattern)
        case Choice(options=options):
            return StructuredOutputsParams(choice=list(options))
        case Grammar(ebnf=ebnf):
            return StructuredOutputsParams(grammar=ebnf)
        case _:
            assert_never(wanted)
