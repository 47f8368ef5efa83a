"""Tests of the fit of a profile to measured iterations: its predictions, and its stated error."""

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.announced import profile_of
from shared.perf.fitting import LEAST, Timed, coefficients, error_of
from shared.perf.forms import PiecewiseTokens
from shared.perf.shape import BatchShape
from tests import made
from tests.shared.perf.timings import TRUE, drawn, file_of, timed


@pytest.mark.parametrize(
    ("noise", "stalls", "within"), [(0.0, 0.0, 0.01), (0.05, 0.0, 0.03), (0.05, 0.08, 0.05)]
)
def test_a_fit_predicts_batches_it_has_not_seen_although_times_scatter_and_some_iterations_stalled(
    noise: float, stalls: float, within: float
) -> None:
    rng = random.Random(0)
    file = file_of(timed(drawn(rng, 250), noise, rng, stalls))
    profile, true = file.profile(), TRUE.profile("true", 0.0)
    off = [abs(profile.batch_s(shape) / true.batch_s(shape) - 1) for shape in drawn(rng, 300)]
    assert sum(off) / len(off) < within


def test_a_verified_draft_has_a_price_beyond_that_of_a_token() -> None:
    rng = random.Random(0)
    dear = replace(TRUE, attention=replace(TRUE.attention, v=0.0004)).profile("dear", 0.0)
    timings = []
    for shape in drawn(rng, 250):
        if shape.decodes and rng.random() < 0.5:
            n = rng.randint(1, shape.decodes)
            each = np.array([rng.randint(1, 3) for _ in range(n)], dtype=np.int32)
            shape = shape.with_drafts(each, np.full(n, shape.decode_context // shape.decodes))
        timings.append(Timed(shape, rng.uniform(0.95, 1.05) * dear.batch_s(shape)))
    file = file_of(timings)
    assert isinstance(file.coefficients, PiecewiseTokens)
    assert file.coefficients.attention.v == pytest.approx(0.0004, rel=0.15)
    shape = BatchShape(decodes=20, decode_context=4000)
    drafts = shape.with_drafts(np.full(20, 2), np.full(20, 200))
    extra_s = file.profile().batch_s(drafts) - file.profile().batch_s(drafts._replace(drafts=0))
    assert extra_s == pytest.approx(40 * 0.0004, rel=0.15)
    # what remains for prompts beside them counts it
    tokens = file.profile().prefill_budget(drafts, 0, 0.060, 4000)
    assert 0 < tokens < file.profile().prefill_budget(drafts._replace(drafts=0), 0, 0.060, 4000)
    assert file.profile().batch_s(drafts.with_chunk(tokens, 0)) <= 0.060


def test_the_stated_error_is_that_of_iterations_the_fit_has_not_seen() -> None:
    rng = random.Random(7)
    timings = timed(drawn(rng, 300), 0.10, rng)
    error = file_of(timings).error
    assert error.mape == pytest.approx(0.05, abs=0.01)  # a uniform 10 % is 5 % off on average
    assert error.p95 == pytest.approx(0.095, abs=0.02)
    for mape in (error.mape_decode_only, error.mape_mixed, error.mape_prefill_only):
        assert mape == pytest.approx(0.05, abs=0.015)
    within = error_of(coefficients(timings).profile("all", 0.0), timings, "what it was fitted to")
    assert within.mape is not None
    assert within.mape < error.mape
    decodes = [one for one in timings if not one.shape.prefill_tokens]
    only = file_of(decodes).error
    assert (only.mape_mixed, only.mape_prefill_only) == (None, None)


@given(st.integers(0, 2**32), st.integers(LEAST, 90))
@settings(deadline=None, max_examples=25)
def test_whatever_was_measured_the_fit_is_finite_rises_and_can_be_announced(
    seed: int, n: int
) -> None:
    rng = random.Random(0)
    file = file_of([Timed(shape, math.exp(rng.uniform(-9, 2))) for shape in drawn(rng, n)])
    form = file.coefficients
    assert isinstance(form, PiecewiseTokens)
    assert min(msgspec.structs.astuple(form.attention)) >= 0
    assert min(np.cumsum(form.slopes)) >= -1e-12
    assert file.profile().batch_s(BatchShape(decodes=1)) > 0
    one = BatchShape(decodes=1)
    announced = made.announce(profile=file.name, fitted=file)
    assert profile_of(announced).batch_s(one) == file.profile().batch_s(one)


def test_too_few_timings_and_impossible_ones_are_refused() -> None:
    rng = random.Random(1)
    timings = timed(drawn(rng, LEAST), 0.0, rng)
    with pytest.raises(ValueError, match="too few"):
        file_of(timings[1:])
    with pytest.raises(ValueError, match="duration"):
        file_of([*timings[1:], Timed(timings[0].shape, 0.0)])
