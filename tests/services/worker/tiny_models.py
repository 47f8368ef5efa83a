"""Makes models of two layers with random weights, in Hugging Face format, for engine tests."""

from pathlib import Path
from typing import Any

import torch
import transformers

from shared.text.tokenizer import Tokenizer


def tiny_model(folder: Path, family: str, **options: Any) -> Path:
    """A model of two layers, with weights so large that the next token is seldom a close call."""
    size = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 261,
        "max_position_embeddings": 256,
    }
    size |= (
        {"word_embed_proj_dim": 64, "ffn_dim": 128}
        if family == "OPT"
        else {"intermediate_size": 128}
    )
    size |= {"num_key_value_heads": 2} if family not in ("OPT", "GPTNeoX", "Mamba") else {}
    size |= (
        {"head_dim": 16}
        if family in ("Llama", "Qwen3", "Mistral") or family.startswith("Gemma")
        else {}
    )
    config = getattr(transformers, f"{family}Config")(
        **{**size, **options}, bos_token_id=256, eos_token_id=257, pad_token_id=258
    )
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
        elif not family.startswith("Gemma"):
            weights.data += torch.randn(weights.shape) * 0.1  # biases and norms count too
    model.save_pretrained(folder)
    Tokenizer.builtin().inner.save(str(folder / "tokenizer.json"))
    return folder


def near(folder: Path, model: Path, noise: float) -> Path:
    """`model` with noise on its weights: as a draft it is right now and then."""
    copy: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    for weights in copy.parameters():
        weights.data += noise * weights.data.std() * torch.randn(weights.shape)
    copy.save_pretrained(folder)
    Tokenizer.builtin().inner.save(str(folder / "tokenizer.json"))
    return folder
