"""Tests of the built-in workloads (prompt and output lengths): they have the quantiles that papers
published, and keep to the model's context.
"""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.lengths.laws import Knots, Law, TruncatedLognormal, TruncatedWeibull, coupled
from loadgen.load.workload import (
    AZURE_CODE,
    AZURE_CONV,
    CHATBOT,
    CODER,
    SHAREGPT,
    SUMMARIZER,
    WORKLOADS,
    Shape,
    named_workload,
)
from shared.errors import ConfigError
from shared.rules.tiers import load_tiers

# QoServe Table 2: p50 and p90 of prompts and of outputs.
TABLE_2 = {
    "sharegpt": (1730, 5696, 415, 834),
    "azure-conv": (928, 3830, 41, 342),
    "azure-code": (1930, 6251, 8, 43),
}
# SLOs-Serve Table 4: mean, p99 and standard deviation of prompts and of outputs.
TABLE_4 = {
    "chatbot": ((763, 1591, 424), (266, 619, 160)),
    "coder": ((847, 2010, 617), (26, 232, 47)),
    "summarizer": ((1333, 1946, 444), (202, 1508, 234)),
}
SHAPES = {shape.application: shape for shape in (SHAREGPT, AZURE_CONV, AZURE_CODE)}


def drawn(law: Law, n: int = 40_000) -> np.ndarray:
    rng = Random(7)
    return np.array([law.at(rng.random()) for _ in range(n)])


@pytest.mark.parametrize("name", TABLE_2)
def test_medians_and_90th_percentiles_are_those_of_table_2(name: str) -> None:
    p50, p90, out50, out90 = TABLE_2[name]
    for law, middle, high in ((SHAPES[name].prompt, p50, p90), (SHAPES[name].output, out50, out90)):
        tokens = drawn(law)
        assert np.percentile(tokens, (50, 90)) == pytest.approx((middle, high), rel=0.03)
        assert tokens.min() >= 1


@pytest.mark.parametrize("name", TABLE_4)
def test_means_spreads_and_99th_percentiles_are_those_of_slos_serves_table_4(name: str) -> None:
    (shape,) = WORKLOADS[name]
    for law, (mean, p99, deviation) in zip(
        (shape.prompt, shape.output), TABLE_4[name], strict=True
    ):
        tokens = drawn(law)
        assert tokens.mean() == pytest.approx(mean, rel=0.03)
        assert np.percentile(tokens, 99) == pytest.approx(p99, rel=0.05)
        assert tokens.std() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("shape", [CHATBOT, CODER, SUMMARIZER], ids=lambda one: one.application)
def test_pairs_are_correlated_as_their_shape_says(shape: Shape) -> None:
    rng = Random(7)
    pairs = np.array([shape.pair(rng, 1_000_000)[:2] for _ in range(20_000)])
    ranks = pairs.argsort(axis=0).argsort(axis=0)
    assert np.corrcoef(ranks.T)[0, 1] == pytest.approx(shape.rank_correlation, abs=0.03)


@given(u=st.floats(0, 1, exclude_max=True), v=st.floats(1e-6, 1 - 1e-6))
def test_values_without_correlation_stay_what_they_were(u: float, v: float) -> None:
    assert coupled(u, v, 0.0) == pytest.approx(v, abs=1e-9)


@given(
    mu=st.floats(0, 9),
    sigma=st.floats(0.1, 3),
    maximum=st.integers(2, 20_000),
    seed=st.integers(0, 99),
)
def test_drawn_lengths_lie_between_one_and_the_maximum(
    mu: float, sigma: float, maximum: int, seed: int
) -> None:
    rng = Random(seed)
    for law in (
        TruncatedLognormal(mu, sigma, maximum),
        TruncatedWeibull(sigma, np.exp(mu), maximum),
    ):
        assert all(1 <= law.at(rng.random()) <= maximum for _ in range(20))


def test_a_workload_keeps_to_the_context() -> None:
    for name in ("sharegpt", "azure-conv", "mix"):
        source, rng = named_workload(name, 2048), Random(1)
        assert all(sum(source.draw(i, i % 3, rng)[:2]) <= 2048 for i in range(500))


def test_a_context_that_holds_nothing_is_refused() -> None:
    long = Shape("long", Knots((0, 1), (500, 900)), Knots((0, 1), (1, 2)))
    with pytest.raises(
        ConfigError, match="workload long: nothing of it fits a context of 400 tokens"
    ):
        long.pair(Random(1), 400)


def test_the_short_mix_has_a_quarter_of_the_length() -> None:
    short, whole = named_workload("short-mix", 100_000), named_workload("mix", 100_000)
    for rank in range(3):
        rng, same = Random(5), Random(5)
        for _ in range(200):
            few, many = short.draw(0, rank, rng), whole.draw(0, rank, same)
            assert few.application == many.application
            assert few[:2] == (
                max(1, round(many.prompt_tokens / 4)),
                max(1, round(many.output_tokens / 4)),
            )


@pytest.mark.parametrize(
    ("workload", "tiers", "of"),
    [
        (
            "mixed",
            "slos-serve-mixed",
            {"coder": "coder", "chatbot": "chatbot", "summarizer": "summarizer"},
        ),
        (
            "adaserve-placeholder",
            "adaserve-3",
            {"coding": "humaneval-placeholder", "chat": "chatbot", "summary": "cnn-dm-placeholder"},
        ),
    ],
)
def test_each_tier_of_a_papers_mixture_has_lengths_of_its_own_kind(
    workload: str, tiers: str, of: dict[str, str]
) -> None:
    source, rng = named_workload(workload, 8192), Random(1)
    assert {
        tier: source.draw(0, rank, rng).application
        for rank, tier in enumerate(load_tiers(tiers).tiers)
    } == of


def test_scenarios_of_slos_serve_are_tight_where_its_table_1_says() -> None:
    bounds = {
        kind: load_tiers(f"slos-serve-{kind}").tiers[kind].slo
        for kind in ("coder", "chatbot", "summarizer")
    }
    assert {kind: (slo.ttft_x, slo.tbt_s) for kind, slo in bounds.items()} == {
        "coder": (5, 0.05),
        "chatbot": (5, 0.1),
        "summarizer": (3, 0.1),
    }
    assert {kind: tier.slo for kind, tier in load_tiers("slos-serve-mixed").tiers.items()} == bounds


def test_an_unknown_workload_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"azure-code, .*, mix, "):
        named_workload("poetry", 8192)
