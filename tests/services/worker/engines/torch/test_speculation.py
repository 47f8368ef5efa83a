"""Tests of speculation in the torch engine: with a draft model it makes the tokens that it makes
without one, by chains and trees, whatever else is in the batch and wherever the KV lies.

Longer: SLACKLINE_TORCH_EXAMPLES=1000 .venv/bin/python -m pytest
tests/services/worker/engines/torch/test_speculation.py
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import Done
from shared.columns import pack
from shared.core.worker.step import Load, Work
from shared.errors import ConfigError
from shared.schemas import Sampling, Selection
from shared.structured import Regex
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot

torch = pytest.importorskip("torch")

from services.worker.engines.torch import draft_model  # noqa: E402
from services.worker.engines.torch.engine import TorchEngine  # noqa: E402
from tests.services.worker.devices import device_of, needs_cuda  # noqa: E402
from tests.services.worker.engines.torch.playing import Played, play  # noqa: E402
from tests.services.worker.tiny_models import near, tiny_model  # noqa: E402

EXAMPLES = int(os.environ.get("SLACKLINE_TORCH_EXAMPLES", "8"))
seeded = settings(deadline=None, print_blob=True, max_examples=EXAMPLES)
OUTPUT = 14
# the last three begin alike
PROMPTS = [[(7 * n + 3 * k) % 256 for k in range(n)] for n in (1, 2, 3, 7, 8, 9, 16, 40)]
PROMPTS += [[*PROMPTS[-1][:23], 5, 6], [*PROMPTS[-1][:36]], PROMPTS[-1]]
# every parameter that the next token depends on
ASKED = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9, logprobs=2),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(temperature=0.0, frequency_penalty=1.5, logprobs=1),
    Sampling(temperature=0.8, logit_bias={40: 4.0, 41: 4.0}, min_tokens=6),
    Sampling(temperature=1.0, structured=Regex(pattern="[a-f]{20}")),
)


def asked(n: int) -> Sampling:
    """The sampling parameters of request n."""
    return ASKED[n % len(ASKED)]


class Models(NamedTuple):
    """A model, and two draft models for it."""

    target: Path
    near: Path  # a draft that is often right
    stranger: Path  # one of another family that never is


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    target = tiny_model(tmp_path_factory.mktemp("target"), "Llama")
    return Models(
        target,
        near(tmp_path_factory.mktemp("near"), target, 0.05),
        tiny_model(tmp_path_factory.mktemp("stranger"), "OPT"),
    )


def selection(rng: Random, entries: int) -> Selection:
    """Any speculation, for a plan with so many entries."""
    method = rng.choice(["chain", "slo_then_throughput"])
    widest = rng.choice([1, 2, 4])
    return Selection(
        method=method,
        depth=pack([rng.choice([0, 1, 2, 5]) for _ in range(entries)]),
        width=pack([rng.randint(1, widest) for _ in range(entries)]),
        budget_tokens=rng.choice([entries, 2 * entries, 8 * entries, 1 << 20]),
    )


def played(engine: TorchEngine, rng: Random, counted: Counter[str]) -> Iterator[Played]:
    yield from play(
        engine, rng, PROMPTS, asked, slots=5, output=OUTPUT, drafting=selection, counted=counted
    )
    assert engine._draft is not None
    assert engine._draft.free_blocks == engine._draft.kv_blocks


def without_drafts(folder: Path, device: str) -> dict[int, Played]:
    engine = TorchEngine(
        folder, profile="toy", device=device, dtype="float32", kv_blocks=40, block_tokens=4
    )
    found = {}
    for n, prompt in enumerate(PROMPTS):
        engine.load(Load(Slot(0), prompt, 0, asked(n), n))
        work, did = Work(Slot(0), len(prompt), True), list[Done]()
        while len(did) < OUTPUT:
            did += engine.execute([work], None).done
            work = Work(Slot(0), 1, True)
        engine.release(Slot(0))
        found[n] = Played(
            n, [one.tokens[0] for one in did], [one for each in did for one in each.logprobs]
        )
    return found


@pytest.mark.parametrize(
    ("draft", "way"),
    [
        ("near", "as it comes"),
        pytest.param("near", "padded", marks=pytest.mark.slow),
        pytest.param("near", "in little KV", marks=pytest.mark.slow),
        pytest.param("near", "on CUDA", marks=needs_cuda),
        pytest.param("stranger", "as it comes", marks=pytest.mark.slow),
    ],
)
def test_output_is_the_same_with_drafts_as_without(draft: str, way: str, models: Models) -> None:
    want = without_drafts(models.target, device_of(way))
    engine = TorchEngine(
        models.target,
        profile="toy",
        device=device_of(way),
        dtype="float32",
        kv_blocks=40,
        block_tokens=4,
        draft=getattr(models, draft),
        draft_kv_blocks=14 if way == "in little KV" else 0,  # of one request or two
    )
    assert engine._draft is not None
    for model in (engine._model, engine._draft._model):
        if way == "padded":  # what other devices compute with
            model._pad()
    accepted = Counter[str]()

    @seeded
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        for said in played(engine, Random(seed), accepted):
            plain = want[said.request]
            assert said.tokens == plain.tokens
            for one, other in zip(said.logprobs, plain.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                assert len(one.top) == len(other.top)

    check()
    print(dict(accepted))
    assert accepted["drafted"] > 100
    assert accepted["cached"] > 0
    assert (accepted["accepted"] > 0.2 * accepted["trees"]) == (draft == "near")


def test_a_draft_without_room_for_its_nodes_leaves_the_root(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "LEAST_BLOCKS", 0)
    monkeypatch.setattr(draft_model, "NODES", 0.0)
    engine = TorchEngine(
        models.target, profile="toy", device="cpu", kv_blocks=15, block_tokens=4, draft=models.near
    )
    accepted = Counter[str]()
    want = without_drafts(models.target, "cpu")
    for said in played(engine, Random(3), accepted):
        assert said.tokens == want[said.request].tokens
    assert accepted["drafted"] > 0


def test_a_tree_that_was_not_verified_is_drafted_again(models: Models) -> None:
    """Its root had found no room."""
    draft = draft_model.DraftModel(
        models.near,
        torch.device("cpu"),
        torch.float32,
        kv_blocks=20,
        block_tokens=4,
        vocabulary=261,
        prefix_caching=False,
    )
    asks = [draft_model.Ask(Slot(n), PROMPTS[-1 - n], 2, 1, 0.0) for n in range(2)]
    with torch.inference_mode():
        first = draft.draft(asks)
        draft.keep([draft_model.Accepted(ask.slot, ask.tokens, []) for ask in asks])
        alone, again = draft.draft(asks[:1]), draft.draft(asks)
    assert (again.tokens == first.tokens).all()
    assert (alone.tokens[:, 0] == first.tokens[:, 0]).all()


def test_a_draft_with_another_tokenizer_is_refused(models: Models, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "Llama")
    inner = tokenizers.Tokenizer.from_str(Tokenizer.builtin().inner.to_str())
    inner.add_special_tokens(["<|other|>"])
    inner.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"another tokenizer.*'<\|other\|>'"):
        TorchEngine(models.target, profile="toy", device="cpu", draft=folder)


def test_without_a_draft_model_the_root_is_verified_alone(models: Models) -> None:
    engine = TorchEngine(models.target, profile="toy", device="cpu", kv_blocks=40)
    engine.load(Load(Slot(0), PROMPTS[-1], 0, asked(0), 0))
    engine.execute([Work(Slot(0), len(PROMPTS[-1]), True)], None)
    did = engine.execute([Work(Slot(0), 4, True)], selection(Random(1), 1)).done[0]
    assert (did.computed, len(did.tokens), did.drafted) == (1, 1, 0)
    assert engine.facts.draft == 0.0
