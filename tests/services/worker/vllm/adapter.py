"""A small random LoRA adapter for a Llama, in peft's file format."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, ALPHA = 4, 8


def write_adapter(folder: Path, model: Path, *, seed: int) -> Path:
    """Write an adapter of the query and value projections, as strong as the model's own weights:
    the output changes from the first tokens on.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, wide in outputs.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = (
                torch.randn(RANK, hidden, generator=generator) / hidden**0.5
            )
            weights[f"{path}.lora_B.weight"] = (
                torch.randn(wide, RANK, generator=generator) / RANK**0.5
            )
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model.name,
        "r": RANK, "lora_alpha": ALPHA,
        "target_modules": sorted(outputs), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    return folder
