"""Tests of how the torch engine draws tokens by temperature, top-k and top-p, and of logprobs."""

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.schemas import Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from services.worker.engines.torch.sampling import Draw, choose, likelihoods  # noqa: E402

EXAMPLES = int(os.environ.get("SLACKLINE_TORCH_EXAMPLES", "8"))
seeded = settings(deadline=None, print_blob=True, max_examples=EXAMPLES)


def plainly(logits: Any, sampling: Sampling) -> Any:
    """The shares of all tokens after temperature, top-k and top-p, by the definition."""
    ordered, order = (logits.double() / sampling.temperature).sort(descending=True, stable=True)
    ordered[sampling.top_k or len(ordered) :] = -torch.inf
    shares = ordered.softmax(-1)
    shares[1:][(shares.cumsum(-1) - shares)[1:] >= sampling.top_p] = 0.0
    return torch.zeros_like(shares).scatter(0, order, shares / shares.sum())


@seeded
@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 50, 261, 2048, 5000]),
    st.floats(0.1, 2.0),
    st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    st.one_of(st.just(0), st.integers(1, 6000)),
)
def test_draws_have_the_shares_of_the_definition(
    seed: int, vocabulary: int, temperature: float, top_p: float, top_k: int
) -> None:
    """The cut may be sharp or the tail flat; n draws at even points of [0, 1) would have counts of
    n times the share.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(vocabulary, generator=generator) * float(torch.rand(1, generator=generator)) * 6
    )
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    shares = plainly(logits, sampling)
    n = 4000
    chosen = torch.tensor(
        choose(logits.expand(n, -1), [Draw(sampling, seed, position) for position in range(n)])
    ).bincount(minlength=vocabulary)
    assert (chosen[shares == 0] > 0).sum() <= 1, (
        "a cut token was drawn (one may be at the cut, where rounding decides)"
    )
    likely = shares.topk(min(20, vocabulary)).indices
    for expected, got in zip((shares[likely] * n).tolist(), chosen[likely].tolist(), strict=True):
        assert abs(got - expected) <= 6 * max(expected, 1.0) ** 0.5 + 3


def test_likelihoods_are_of_the_raw_logits() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
    first, second = likelihoods((shares * 3).log(), [1, 0], [0, 3])
    assert first.logprob == pytest.approx(torch.tensor(0.3).log().item())
    assert first.top == ()
    assert second.logprob == pytest.approx(torch.tensor(0.1).log().item())
    assert [token for token, _ in second.top] == [3, 2, 1]
    assert [value for _, value in second.top] == pytest.approx(
        torch.tensor([0.4, 0.3, 0.2]).log().tolist()
    )
