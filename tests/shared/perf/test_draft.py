"""Tests of the cost of a draft model: the time of a step, and of reading a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.perf import profile_file as store
from shared.perf.draft import Draft, draft_of
from shared.perf.shape import BatchShape
from tests.shared.perf.test_profiles import shapes

TARGET = store.load("a100-llama3-8b")


@given(shapes())
def test_one_number_is_that_fraction_of_the_target_for_steps_and_for_prompts(
    shape: BatchShape,
) -> None:
    draft = draft_of(TARGET, 0.05)
    assert draft == draft_of(TARGET, (0.05, 0.05))
    assert draft is not None
    assert draft.step_s(shape) == draft.read_s(shape) == 0.05 * TARGET.batch_s(shape)


@given(shapes(), st.floats(0.001, 0.05), st.integers(1, 4000))
def test_more_to_read_never_takes_less_time_and_costs_the_second_number(
    shape: BatchShape, read: float, tokens: int
) -> None:
    draft, longer = Draft(TARGET, 0.05, read), shape.with_chunk(tokens, 0)
    assert 0 <= draft.read_s(shape) <= draft.read_s(longer)
    if shape.prefill_tokens:
        more_s = TARGET.batch_s(longer) - TARGET.batch_s(shape)
        assert draft.read_s(longer) - draft.read_s(shape) == pytest.approx(read * more_s)


def test_a_step_of_0_is_no_draft_and_impossible_fractions_are_refused() -> None:
    assert draft_of(TARGET, 0.0) is None
    for cost in (-0.1, 1.5, float("nan"), (0.05, 1.5), (0.05, -0.1), (0.05, float("nan"))):
        with pytest.raises(ConfigError, match="fraction"):
            draft_of(TARGET, cost)
