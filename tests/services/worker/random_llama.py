"""A small Llama with random weights in Hugging Face format, made on the spot.

2.9 M parameters, stored as bfloat16 (6 MB), with the built-in byte-level tokenizer. Random weights
would say garbage bytes, so three hidden dimensions are kept out of the network's reach (no layer
writes to them): one-hot marks of the last token's class (vowel, consonant, neither). The output
head reads them as fixed log-odds of the next letter, which forbid everything but lower-case
letters, space, full stop and, rarely, the end; the rest of the network decides among what is left.
So the text depends on the whole context, as a real model's does, and reads like words.
"""

import json
import math
import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.text.tokenizer import BUILTIN_ENDS, BUILTIN_SPECIALS, Tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 256, 4, 8, 4, 688
HEAD = HIDDEN // HEADS
CONTEXT_TOKENS = 8192
_VERSION = 1  # raise it when the weights of a seed change
_CLASSES = 3
_MARK = 5.0  # of a class dimension in the embedding, whose other dimensions have deviation 1
_FORBIDDEN = -40.0  # log-odds
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnprstvwyz"
# Share of each kind of next token after a vowel, a consonant, anything else.
_SHARES = {
    "vowel": (0.08, 0.62, 0.40),
    "consonant": (0.67, 0.08, 0.60),
    "space": (0.24, 0.28, 0.0),
    "stop": (0.01, 0.015, 0.0),
    "end": (0.0, 0.005, 0.0),
}


def make(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the model unless this very one is there. Appears whole or not at all."""
    path = Path(folder)
    made = {"seed": seed, "version": _VERSION}
    if (path / "config.json").exists() and json.loads((path / "config.json").read_text()).get(
        "slackline"
    ) == made:
        return path
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.builtin()
    ids = {
        "bos_token_id": BUILTIN_SPECIALS["<|bos|>"],
        "eos_token_id": sorted(BUILTIN_ENDS),
        "pad_token_id": BUILTIN_SPECIALS["<|pad|>"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "slackline": made,
        **ids,
    }
    names = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": CONTEXT_TOKENS,
    }
    with tempfile.TemporaryDirectory(dir=path) as scratch:
        draft = Path(scratch)
        save_file(
            _weights(tokenizer.vocabulary, BUILTIN_SPECIALS["<|eos|>"], seed),
            draft / "model.safetensors",
            metadata={"format": "pt"},
        )
        tokenizer.inner.save(str(draft / "tokenizer.json"))
        (draft / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}, indent=1)
        )
        (draft / "generation_config.json").write_text(json.dumps(ids, indent=1))
        (draft / "config.json").write_text(json.dumps(config, indent=1))
        for name in (
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "config.json",
        ):
            # config.json last: it says that the rest is there
            os.replace(draft / name, path / name)
    return path


def _weights(vocabulary: int, eos: int, seed: int) -> dict[str, torch.Tensor]:
    """Draw matrices of deviation 1/sqrt(inputs), so that each layer adds about as much as it was
    given.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)

    def draw_into_stream(inputs: int) -> torch.Tensor:
        matrix = draw(HIDDEN, inputs)
        matrix[:_CLASSES] = 0.0
        return matrix

    weights = {
        "model.embed_tokens.weight": _embedding(vocabulary, generator),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        weights |= {
            f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.self_attn.q_proj.weight": draw(HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": draw(KV_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": draw(KV_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": draw_into_stream(HEADS * HEAD),
            f"{layer}.mlp.gate_proj.weight": draw(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": draw(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": draw_into_stream(INTERMEDIATE),
        }
    head = draw(vocabulary, HIDDEN)
    head[:, :_CLASSES] = _log_odds(vocabulary, eos) / _MARK
    weights["lm_head.weight"] = head
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _embedding(vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    table = torch.randn(vocabulary, HIDDEN, generator=generator)
    table[:, :_CLASSES] = 0.0
    for token in range(vocabulary):
        letter = chr(token).lower() if token < 128 else ""
        kind = 2 if not letter else 0 if letter in _VOWELS else 1 if letter in _CONSONANTS else 2
        table[token, kind] = _MARK
    return table


def _log_odds(vocabulary: int, eos: int) -> torch.Tensor:
    """[vocabulary, class of the last token]."""
    members = {
        "vowel": [*_VOWELS.encode()],
        "consonant": [*_CONSONANTS.encode()],
        "space": [0x20],
        "stop": [0x2E],
        "end": [eos],
    }
    odds = torch.full((vocabulary, _CLASSES), _FORBIDDEN)
    for kind, tokens in members.items():
        for last, share in enumerate(_SHARES[kind]):
            if share > 0:
                odds[tokens, last] = math.log(share / len(tokens))
    return odds
