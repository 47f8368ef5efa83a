"""Tests of the correction of a draft model's cost by what acks (workers' reports) say."""

import pytest

from shared.perf.draft import Draft
from shared.perf.draft_correction import DraftCorrection
from shared.perf.shape import BatchShape
from tests.shared.policy.views import Linear

SHAPE = BatchShape(decodes=8, decode_context=800)


@pytest.mark.parametrize("truth", [0.05, 0.2, 0.6])
def test_a_wrong_cost_of_drafting_is_found(truth: float) -> None:
    correction = DraftCorrection(Draft(Linear(), 0.2, 0.1))
    measured_s = Draft(Linear(), truth, truth / 2).step_s(SHAPE)
    for n in range(200):
        assert correction.now is not None
        # now and then the machine stands still
        correction.observe(correction.now.step_s(SHAPE), measured_s * (50 if n % 40 == 7 else 1))
    assert correction.now is not None
    assert correction.now.step == pytest.approx(truth, rel=0.15)
    assert correction.now.read == pytest.approx(truth / 2, rel=0.15)


def test_what_is_unknown_changes_nothing() -> None:
    draft = Draft(Linear(), 0.2, 0.1)
    correction = DraftCorrection(draft)
    correction.observe(0.002, 0.0)
    correction.observe(0.0, 0.002)
    assert correction.now == draft
    none = DraftCorrection(None)
    none.observe(0.002, 0.004)
    assert none.now is None
