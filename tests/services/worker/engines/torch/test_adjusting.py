"""Tests of penalties, biases and minimum lengths in the torch engine: as transformers has them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from services.worker.engines.torch.adjusting import Written, adjusted  # noqa: E402
from services.worker.engines.torch.sampling import Draw, choose  # noqa: E402
from shared.schemas import Sampling  # noqa: E402

VOCABULARY = 64
tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)


def drawn(seed: int, rows: int = 1) -> Any:
    """Random logits of so many rows."""
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def of(
    logits: Any, prompt: list[int], output: list[int], ends: tuple[int, ...] = (), **asked: Any
) -> Any:
    """The logits, adjusted for a request with this text and these parameters."""
    return adjusted(logits, [Written(Sampling(**asked), len(prompt), [*prompt, *output], ends)])


@given(st.integers(0, 999), tokens, tokens, st.sampled_from([0.5, 1.3, 2.0]))
def test_repetition_is_penalised_as_by_transformers(
    seed: int, prompt: list[int], output: list[int], penalty: float
) -> None:
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), drawn(seed))
    assert torch.equal(of(drawn(seed), prompt, output, repetition_penalty=penalty), wanted)


@given(
    st.integers(0, 999),
    st.dictionaries(
        st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), min_size=1, max_size=5
    ),
)
def test_biases_are_added_as_by_transformers(seed: int, bias: dict[int, float]) -> None:
    processor = SequenceBiasLogitsProcessor(
        [[[token], float(value)] for token, value in bias.items()]
    )
    assert torch.allclose(
        of(drawn(seed), [1], [2], logit_bias=bias), processor(torch.tensor([[1, 2]]), drawn(seed))
    )


@given(st.integers(0, 999), tokens, tokens, st.integers(1, 25))
def test_no_end_is_drawn_before_min_tokens_as_by_transformers(
    seed: int, prompt: list[int], output: list[int], least: int
) -> None:
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), least, [3, 9])
    wanted = processor(torch.tensor([prompt + output]), drawn(seed))
    assert torch.equal(of(drawn(seed), prompt, output, (3, 9), min_tokens=least), wanted)


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    changed = of(
        torch.zeros(1, VOCABULARY),
        [5, 6],
        [7, 7, 7, 8],
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )[0]
    assert changed[[5, 6, 7, 8]].tolist() == [0.0, 0.0, -1.25, -0.75]


@given(
    st.integers(0, 999), st.sampled_from([0.01, 0.1, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 2.0])
)
def test_min_p_leaves_the_tokens_that_transformers_leaves(
    seed: int, min_p: float, temperature: float
) -> None:
    left = MinPLogitsWarper(min_p)(torch.tensor([[0]]), drawn(seed) / temperature)[0].isfinite()
    sampling = Sampling(min_p=min_p, temperature=temperature)
    found = choose(drawn(seed).expand(300, -1), [Draw(sampling, seed, n) for n in range(300)])
    assert all(left[token] for token in found)
    likely = (drawn(seed)[0] / temperature).softmax(-1).masked_fill(~left, 0.0)
    # missed by 300 draws once in five million times
    certain = (likely / likely.sum() > 0.05).nonzero()[:, 0].tolist()
    assert set(certain) <= set(found)


def test_tokens_that_the_model_does_not_have_change_nothing() -> None:
    far = Written(Sampling(logit_bias={VOCABULARY: 5.0}, min_tokens=9), 1, [1, 2], (-1, VOCABULARY))
    assert torch.equal(adjusted(drawn(2), [far]), drawn(2))
