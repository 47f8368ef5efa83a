"""The cost of a draft model is measured within the contexts of both models."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.engine import EngineFacts, Outcome
from services.worker.engines.make import make
from shared.core.worker.step import Load, Work
from shared.perf.draft import DRAFT
from shared.schemas import Selection
from shared.vocabulary import Slot

torch = pytest.importorskip("torch")

from services.worker.engines.draft_cost import DEPTH, measure_draft  # noqa: E402
from services.worker.engines.torch.engine import TorchEngine  # noqa: E402
from tests.services.worker.tiny_models import near, tiny_model  # noqa: E402


def pair(folder: Path, context: int, draft_context: int) -> tuple[Path, Path]:
    """A model and its draft, with contexts of so many tokens."""
    target = tiny_model(folder / "target", "Llama", max_position_embeddings=context)
    draft = near(folder / "draft", target, 0.05)
    config = draft / "config.json"
    known = msgspec.json.decode(config.read_bytes())
    config.write_bytes(msgspec.json.encode(known | {"max_position_embeddings": draft_context}))
    return target, draft


class Watched:
    """A torch engine, and the drafts that each request of each iteration verified."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine, self.drafted = engine, list[int]()

    @property
    def facts(self) -> EngineFacts:
        return self.engine.facts

    def load(self, load: Load) -> None:
        self.engine.load(load)

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        outcome = self.engine.execute(work, selection)
        if selection is not None:
            self.drafted += [did.drafted for did in outcome.done]
        return outcome

    def release(self, slot: Slot) -> None:
        self.engine.release(slot)


def test_a_worker_whose_model_has_a_short_context_starts(tmp_path: Path) -> None:
    target, draft = pair(tmp_path, 64, 256)
    engine, _ = make(
        WorkerConfig(engine="torch", model=str(target), draft_model=str(draft), kv_blocks=64)
    )
    assert engine.facts.context_tokens == 64
    assert isinstance(engine.facts.draft, tuple)  # it was measured
    assert not engine.snapshot().slots


@pytest.mark.parametrize(("context", "draft_context"), [(256, 32), (32, 256), (21, 20)])
def test_the_cost_is_that_of_drafts_and_not_of_failing_to_draft(
    context: int, draft_context: int, tmp_path: Path
) -> None:
    target, draft = pair(tmp_path, context, draft_context)
    watched = Watched(TorchEngine(target, profile="toy", device="cpu", kv_blocks=64, draft=draft))
    measure_draft(watched)  # type: ignore[arg-type]
    assert watched.drafted
    assert set(watched.drafted) == {DEPTH}


def test_where_no_context_has_room_for_drafts_the_cost_is_the_default(tmp_path: Path) -> None:
    target, draft = pair(tmp_path, 256, 12)
    engine, _ = make(
        WorkerConfig(engine="torch", model=str(target), draft_model=str(draft), kv_blocks=64)
    )
    assert engine.facts.draft == DRAFT
