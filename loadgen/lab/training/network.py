"""The shapes of both models, as transformers' Llama, and a fast forward pass for CPU training."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from loadgen.lab.training.byte_pairs import CONTEXT_TOKENS, SIZE

SHAPES: dict[str, dict[str, int]] = {
    "slackline-5m": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
    },
    "slackline-draft": {
        "hidden_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 512,
    },
}
ROPE_THETA = 10_000.0
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def build(shape: dict[str, int], *, ends: list[int], pad: int, vocabulary: int = SIZE) -> Any:
    """A new model in float32 with tied embeddings."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=ends,
        pad_token_id=pad,
        attn_implementation="plain_causal",
        **shape,
    )
    return LlamaForCausalLM(config)


def plain_causal(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention over whole rows, without padding or cache.

    Compiled, it is twice as fast up to 512 tokens as the fused kernel, whose backward pass is slow.
    """
    groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    hidden = torch.full((tokens, tokens), float("-inf"), device=query.device).triu(1)
    weights = torch.softmax((query * scaling @ key.transpose(-1, -2)).float() + hidden, -1).to(
        value.dtype
    )
    return (weights @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("plain_causal", plain_causal)


def keep_memory() -> None:
    """Makes malloc keep freed pages, since each step frees and allocates large tensors again."""
    with suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL(None)
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28)):
            library.mallopt(option, value)


def compiled(function: Callable[..., Tensor], *, wanted: bool) -> Callable[..., Tensor]:
    """The function compiled, if wanted: twice as fast, but it needs a C++ compiler."""
    return torch.compile(function, dynamic=False) if wanted else function


def next_token_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats per token."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def distilling_loss(model: Any, teacher: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """KL divergence from the teacher plus a quarter of the cross entropy; nats per token."""
    with torch.no_grad():
        teacher_log = torch.log_softmax(
            teacher(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float(), -1
        )
    logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
    model_log = torch.log_softmax(logits, -1)
    divergence = (teacher_log.exp() * (teacher_log - model_log)).sum(-1).mean()
    return divergence + 0.25 * nn.functional.nll_loss(model_log, targets.flatten())
