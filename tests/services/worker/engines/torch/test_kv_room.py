"""Tests of how much KV the torch engine takes: as much as the GPU's free memory has room for."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from services.worker.engines.torch.draft_model import roomy_blocks  # noqa: E402
from services.worker.engines.torch.kv_room import SHARE, blocks_that_fit  # noqa: E402
from shared.errors import ConfigError  # noqa: E402

GIB = 1 << 30
# Llama 3 8B: by its model card 128 KiB of keys and values for a token in bfloat16
LLAMA_3_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL = LLAMA_3_8B | {"num_hidden_layers": 4, "hidden_size": 1024, "head_dim": 32}
OPT = {
    "model_type": "opt", "num_hidden_layers": 40, "num_attention_heads": 40, "hidden_size": 5120,
    "max_position_embeddings": 2048,
}  # fmt: skip


def folder(where: Path, weight_bytes: int = 0, **config: object) -> Path:
    where.mkdir()
    (where / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    with (where / "model.safetensors").open("wb") as file:
        file.truncate(weight_bytes)
    return where


def fitting(free: float, model: Path, draft: Path | None = None, max_slots: int = 1024) -> int:
    return blocks_that_fit(
        int(free), model, draft, dtype=torch.bfloat16, block_tokens=16, max_slots=max_slots
    )


def test_it_fills_its_share_of_the_free_memory(tmp_path: Path) -> None:
    blocks = fitting(60 * GIB, folder(tmp_path / "m", **LLAMA_3_8B))
    assert SHARE * 60 * GIB - 16 * 131_072 < blocks * 16 * 131_072 <= SHARE * 60 * GIB


def test_a_model_that_does_not_name_its_heads_of_keys_has_as_many_as_of_queries(
    tmp_path: Path,
) -> None:
    blocks = fitting(40 * GIB, folder(tmp_path / "m", **OPT))
    taken = blocks * 16 * 2 * 40 * 5120 * 2
    assert 0.99 * SHARE * 40 * GIB < taken <= SHARE * 40 * GIB


def test_a_draft_model_and_its_own_kv_fit_too(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", **LLAMA_3_8B)
    draft = folder(tmp_path / "d", weight_bytes=2 * GIB, **SMALL)
    blocks = fitting(60 * GIB, model, draft)
    taken = 2 * GIB + 16 * (blocks * 131_072 + roomy_blocks(blocks) * 2 * 4 * 8 * 32 * 2)
    assert 0.99 * SHARE * 60 * GIB < taken <= SHARE * 60 * GIB


def test_there_is_no_more_than_its_requests_can_fill(tmp_path: Path) -> None:
    assert fitting(900 * GIB, folder(tmp_path / "m", **LLAMA_3_8B), max_slots=4) == 4 * 8192 // 16


def test_a_gpu_that_is_full_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no room for KV: 0\.0 GiB are free"):
        fitting(1e6, folder(tmp_path / "m", **LLAMA_3_8B))
