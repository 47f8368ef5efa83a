"""Tests of how a worker measures the cost of its draft model, also where contexts are short."""

from pathlib import Path

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.engines.make import make
from shared.perf.draft import DRAFT

torch = pytest.importorskip("torch")

from tests.services.worker.tiny_models import near, tiny_model  # noqa: E402


def pair(folder: Path, context: int, draft_context: int) -> tuple[Path, Path]:
    """A model and its draft, with contexts of so many tokens."""
    target = tiny_model(folder / "target", "Llama", max_position_embeddings=context)
    draft = near(folder / "draft", target, 0.05)
    config = draft / "config.json"
    known = msgspec.json.decode(config.read_bytes())
    config.write_bytes(msgspec.json.encode(known | {"max_position_embeddings": draft_context}))
    return target, draft


def test_a_worker_whose_model_has_a_short_context_starts(tmp_path: Path) -> None:
    target, draft = pair(tmp_path, 64, 256)
    engine, _ = make(
        WorkerConfig(engine="torch", model=str(target), draft_model=str(draft), kv_blocks=64)
    )
    assert engine.facts.context_tokens == 64
    assert isinstance(engine.facts.draft, tuple)  # it was measured
    assert not engine.snapshot().slots


def test_where_no_context_has_room_for_drafts_the_cost_is_the_default(tmp_path: Path) -> None:
    target, draft = pair(tmp_path, 256, 12)
    engine, _ = make(
        WorkerConfig(engine="torch", model=str(target), draft_model=str(draft), kv_blocks=64)
    )
    assert engine.facts.draft == DRAFT
