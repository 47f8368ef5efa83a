"""In a larger body the shipped model says what it says by itself."""

from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.models import shipped as models
from shared.text.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from loadgen.lab.live_drafts.larger_body import Body, enlarge  # noqa: E402


def logits(folder: Path) -> Any:
    """[tokens, vocabulary] of a question, by transformers itself."""
    prompt = Tokenizer.load(folder).encode("<|im_start|>user\nWhat is a river?<|im_end|>\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize(
    ("body", "apart"),
    [
        pytest.param(Body(8, 1024, 16, 4, 64, 1024), 1e-5, id="more layers, heads and dimensions"),
        # queries are larger by the root of 2, which bfloat16 rounds
        pytest.param(Body(6, 1024, 8, 4, 128, 704), 2e-2, id="larger heads"),
    ],
)
def test_the_shipped_model_says_the_same_in_a_larger_body(
    body: Body, apart: float, tmp_path: Path
) -> None:
    enlarge(models.DEFAULT, body, tmp_path / "larger")
    own, larger = logits(models.folder(models.DEFAULT)), logits(tmp_path / "larger")
    assert larger.shape == own.shape
    assert float((larger - own).abs().max()) < apart * float(own.abs().max())


def test_a_body_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        enlarge(models.DEFAULT, Body(6, 128, 4, 2, 64, 704), tmp_path)
