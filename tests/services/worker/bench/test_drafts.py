"""The bench sees every pass of a model, and changes none."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from services.worker.bench.drafts import DraftBench, time_passes  # noqa: E402
from services.worker.engines.torch.engine import TorchEngine  # noqa: E402
from services.worker.engines.torch.recorded_passes import _Recorded  # noqa: E402
from shared.core.worker.step import Load, Work  # noqa: E402
from shared.schemas import Sampling  # noqa: E402
from shared.vocabulary import Slot  # noqa: E402
from tests.services.worker.tiny_models import near, tiny_model  # noqa: E402


def tokens(engine: TorchEngine, iterations: int) -> list[list[int]]:
    engine.load(Load(Slot(0), [5, 6, 7, 8], 0, Sampling(temperature=0.0), 1))
    work = [[Work(Slot(0), 4, True)], *([Work(Slot(0), 1, True)] for _ in range(iterations - 1))]
    made = [list(engine.execute(one, None).done[0].tokens) for one in work]
    engine.release(Slot(0))
    return made


def test_each_pass_is_told_with_what_it_took(tmp_path: Path) -> None:
    engine = TorchEngine(tiny_model(tmp_path, "Llama"), profile="toy", kv_blocks=8, device="cpu")
    before, told = tokens(engine, 3), list[float]()
    clock = itertools.count()  # a second passes between any two looks
    time_passes(engine._model, lambda: float(next(clock)), told.append)
    assert tokens(engine, 3) == before
    assert told == [1.0, 1.0, 1.0]


def test_a_recorded_pass_is_told_when_it_is_replayed() -> None:
    """Nothing can be recorded on a CPU, so this one is a stand-in."""
    replayed, told = list[str](), list[float]()
    recorded = _Recorded(torch.zeros(1), SimpleNamespace(replay=lambda: replayed.append("once")))
    passes = SimpleNamespace(_passes={"size": recorded})
    model = SimpleNamespace(_forward=None, _passes=passes, device=torch.device("cpu"))
    clock = itertools.count()
    time_passes(model, lambda: float(next(clock)), told.append)
    passes._passes["size"].graph.replay()
    assert (replayed, told) == (["once"], [1.0])


def test_drafting_is_a_part_of_its_iteration_on_a_busy_machine(tmp_path: Path) -> None:
    """Each drafting waits for a core longer than a whole iteration computes: both are told in CPU
    time.
    """
    target = tiny_model(tmp_path / "target", "Llama")
    bench = DraftBench(target, near(tmp_path / "draft", target, 0.05), output_tokens=3)
    of_engine: Any = bench.engine
    draft = of_engine._draft.draft

    def waits(asks: object) -> object:
        time.sleep(0.1)
        return draft(asks)

    of_engine._draft.draft = waits
    one = bench.engine_s(8, 16)
    assert 0.0 < one.drafted_s < one.iteration_s
