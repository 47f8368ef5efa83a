"""Tests of the model of iteration times that Ascendra refits to what it sees (section 5.1)."""

from random import Random

import numpy as np
import pytest

from shared.perf import profile_file as store
from shared.perf.five_coefficients import AscendraProfile
from shared.perf.shape import BatchShape
from shared.policy.ascendra.policy import LP
from shared.policy.ascendra.refit import LEAST_BATCHES, Refitted, units_of
from shared.policy.seam import Observation
from tests.shared.policy.ascendra.test_ascendra import ascendra, at, chat, planned
from tests.shared.policy.views import NOW, Linear, decode


def batches(count: int, seed: int = 1) -> list[BatchShape]:
    rng = Random(seed)
    made = []
    for _ in range(count):
        shape = BatchShape(
            decodes=(n := rng.randrange(128)), decode_context=n * rng.randrange(200, 3000)
        )
        for _ in range(rng.randrange(1, 4)):
            shape = shape.with_chunk(rng.randrange(16, 1500), rng.choice([0, 0, 2000]))
        made.append(shape)
    return made


def learned(of: object, given: object, count: int = 400) -> Refitted:
    model = Refitted()
    model.now(given)  # type: ignore[arg-type]
    for n, shape in enumerate(batches(count)):
        model.observe(shape, of.batch_s(shape), NOW + n)  # type: ignore[attr-defined]
    return model


def test_the_units_are_those_of_the_profile_it_began_with() -> None:
    units = units_of(Linear())
    assert (units.weights_s, units.kv_token_s, units.token_s, units.pair_s) == pytest.approx(
        (0.01003, 1e-7, 8e-5, 1e-8)
    )


def test_coefficients_come_back_from_batches_that_follow_the_form() -> None:
    units = units_of(Linear())
    truth = AscendraProfile(
        "t", 0.4, 0.8, 1.1, 0.002, units.weights_s, units.kv_token_s, units.token_s, units.pair_s
    )
    model = learned(truth, Linear())
    assert model.now(Linear()) is model.fitted
    for shape in batches(50, seed=2):
        assert model.now(Linear()).batch_s(shape) == pytest.approx(truth.batch_s(shape), rel=1e-6)


@pytest.mark.parametrize("name", ["a100-llama3-8b", "h100-llama3-8b", "a100-llama3-70b-tp4"])
def test_the_fit_is_within_ten_percent_of_profiles_of_other_forms(name: str) -> None:
    """Figure 6."""
    truth = store.load(name)
    model = learned(truth, truth)
    off = [
        abs(model.now(truth).batch_s(shape) / truth.batch_s(shape) - 1)
        for shape in batches(200, seed=3)
    ]
    assert model.error < 0.1
    assert np.mean(off) < 0.1


def test_a_machine_that_becomes_slower_is_followed() -> None:
    model = learned(Linear(), Linear())
    for n, shape in enumerate(batches(3000, seed=4)):
        model.observe(shape, 1.5 * Linear().batch_s(shape), NOW + 400 + n)
    shape = BatchShape().with_chunk(1000, 0)
    assert model.now(Linear()).batch_s(shape) == pytest.approx(
        1.5 * Linear().batch_s(shape), rel=0.03
    )


def test_the_own_profile_stands_in_until_enough_was_seen_and_while_the_fit_is_far_off() -> None:
    few = learned(Linear(), Linear(), count=LEAST_BATCHES - 1)
    assert few.fitted is None
    given = Linear()
    assert few.now(given) is given
    model, rng = Refitted(), Random(5)
    model.now(given)
    for n, shape in enumerate(batches(600)):
        model.observe(shape, Linear().batch_s(shape) * rng.choice([0.5, 2.0]), NOW + n)
    assert model.error > 0.1
    assert model.now(given) is given


def test_the_refitted_model_moves_the_threshold() -> None:
    """The engine is twice as slow as its profile: a request that would have had time is urgent."""
    policy = ascendra()
    seen = at(
        LP,
        [*(decode(chat(i), context=16) for i in range(128)), chat(500, target=640, arrived_s=-0.5)],
    )
    assert planned(policy, seen)[1] == []
    for n, shape in enumerate(batches(400)):
        policy.observe(Observation(NOW + n, shape, 0.0, 2 * Linear().batch_s(shape)))
    assert planned(policy, seen)[1] == [500]
