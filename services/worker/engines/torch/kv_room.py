"""Computes how much KV a GPU has room for, beside the weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from services.worker.engines.torch.draft_model import LEAST_BLOCKS, NODES
from shared.errors import ConfigError

SHARE = 0.8  # of the free memory; the rest is for passes: what they gather, and the recorded ones


def blocks_that_fit(
    free_bytes: int,
    folder: Path,
    draft: Path | None,
    *,
    dtype: torch.dtype,
    block_tokens: int,
    max_slots: int,
) -> int:
    """The number of blocks of the model in `folder`, whose weights are loaded. `draft`: its draft
    model, which is not loaded yet, and whose KV grows with the model's. No more blocks than
    `max_slots` requests can fill. Raises ConfigError where there is room for none.
    """
    config = _text_config(folder)
    each: float = block_tokens * position_bytes(config, dtype)
    left = SHARE * free_bytes
    if draft is not None:
        own = block_tokens * position_bytes(_text_config(draft), dtype)
        left -= sum(file.stat().st_size for file in draft.glob("*.safetensors"))
        left -= LEAST_BLOCKS * own
        each += (1 + NODES) * own
    if left < each:
        raise ConfigError(
            f"the GPU has no room for KV: {free_bytes / (1 << 30):.1f} GiB are free beside the "
            "weights. Take a smaller model, or stop what else runs there"
        )
    most = max_slots * -(-int(config.max_position_embeddings) // block_tokens)
    return min(int(left // each), most)


def position_bytes(config: Any, dtype: torch.dtype) -> int:
    """The keys and values of one token in all layers. `config`: of the text model."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * kv_heads * size * dtype.itemsize)


def _text_config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
