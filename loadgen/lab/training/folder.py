"""A trained model as a Hugging Face folder: the float32 weights, rounded to bfloat16."""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from loadgen.lab.training import byte_pairs as vocabulary


def write(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the weights, the configuration and the tokenizer, but no model card."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    config = rounded.config
    rounded.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # the library lets only the owner read it
    vocabulary.write(tokenizer, folder)


def read(folder: Path) -> Any:
    """The model, loaded as a user loads it."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    ).eval()
