"""Tests of the correction of a profile by measured iterations, on a machine of another speed."""

import math
from random import Random

import pytest

from shared.perf.online import Corrected
from shared.perf.profile_file import load
from shared.perf.shape import BatchShape


def some_shape(random: Random) -> BatchShape:
    decodes = random.randrange(0, 200)
    shape = BatchShape(decodes=decodes, decode_context=decodes * random.randrange(100, 3_000))
    if not decodes or random.random() < 0.5:
        shape = shape.with_chunk(random.randrange(32, 1_024), random.randrange(0, 4_000))
    return shape


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("times", [2.0, 0.5])
def test_forty_iterations_after_a_change_of_speed_the_residual_is_under_ten_percent(
    seed: int, times: float
) -> None:
    """An engine with a scatter of 5 % becomes twice as slow, or as fast; single predictions are
    right after eight iterations.
    """
    random, base = Random(seed), load("cpu-tiny")
    corrected = Corrected(base)

    def run(speed: float, iterations: int) -> list[float]:
        errors = []
        for _ in range(iterations):
            shape = some_shape(random)
            exec_s = speed * base.batch_s(shape) * random.uniform(0.95, 1.05)
            errors.append(abs(corrected.batch_s(shape) / exec_s - 1))
            corrected.observe(shape, exec_s)
        return errors

    run(1.0, 200)
    assert corrected.residual < 0.05, f"seed {seed}"
    errors = run(times, 40)
    assert corrected.residual < 0.10, f"seed {seed}"
    assert abs(corrected.bias) < 0.10, f"seed {seed}"
    assert sum(errors[8:]) / 32 < 0.10, f"seed {seed}"
    run(times, 100)
    assert corrected.residual < 0.05, f"seed {seed}"
    errors = run(1.0, 40)
    assert corrected.residual < 0.10, f"seed {seed}"


def test_a_regime_not_yet_seen_borrows_what_the_others_taught() -> None:
    base = load("a100-llama3-8b")
    corrected, decodes = Corrected(base), BatchShape(decodes=10, decode_context=10_000)
    for _ in range(100):
        corrected.observe(decodes, 2 * base.batch_s(decodes))
    mixed = decodes.with_chunk(256, 0)
    assert corrected.batch_s(mixed) == pytest.approx(2 * base.batch_s(mixed), rel=0.05)


def test_correction_is_bounded_deterministic_and_deaf_to_nonsense() -> None:
    base = load("cpu-tiny")
    one, two, shape = Corrected(base), Corrected(base), BatchShape(decodes=1, decode_context=1)
    for corrected in (one, two):
        for exec_s in (1e9, 1e9, 0.004, 0.003):
            corrected.observe(shape, exec_s)
        assert all(1 / 16 <= gamma <= 16 for gamma in corrected.gammas)
    assert one.batch_s(shape) == two.batch_s(shape)
    before = one.gammas
    for shape_, exec_s in (
        (BatchShape(), 1.0),
        (shape, 0.0),
        (shape, -1.0),
        (shape, math.nan),
        (shape, math.inf),
    ):
        one.observe(shape_, exec_s)
    assert one.gammas == before
