"""Correction follows a machine of another speed."""

import math
from random import Random

import pytest

from shared.perf.online import Corrected, Regime
from shared.perf.profile_file import load
from shared.perf.shape import BatchShape


def some_shape(random: Random) -> BatchShape:
    decodes = random.randrange(0, 200)
    shape = BatchShape(decodes=decodes, decode_context=decodes * random.randrange(100, 3_000))
    if not decodes or random.random() < 0.5:
        shape = shape.with_chunk(random.randrange(32, 1_024), random.randrange(0, 4_000))
    return shape


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("times", [0.5, 1.5, 3.0])
def test_correction_converges_to_a_machine_of_another_speed(seed: int, times: float) -> None:
    print(f"seed {seed}")
    random, base = Random(seed), load("a100-llama3-8b")
    corrected = Corrected(base)
    for _ in range(150):
        shape = some_shape(random)
        corrected.observe(shape, times * base.batch_s(shape) * random.uniform(0.95, 1.05))
    assert corrected.residual < 0.10
    for gamma in corrected.gammas:
        assert gamma == pytest.approx(times, rel=0.05)


def test_correction_leans_to_over_predicting_where_times_scatter() -> None:
    print("seed 4")
    random, base = Random(4), load("a100-llama3-8b")
    corrected, over = Corrected(base), 0
    for i in range(1_000):
        shape = some_shape(random)
        exec_s = base.batch_s(shape) * random.uniform(0.9, 1.1)
        over += i >= 100 and corrected.batch_s(shape) >= exec_s
        corrected.observe(shape, exec_s)
    assert over / 900 > 0.65


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


@pytest.mark.parametrize("seed", range(4))
def test_different_errors_of_regimes_are_kept_apart_while_the_speed_changes(
    seed: int,
) -> None:
    random, base = Random(seed), load("cpu-tiny")
    corrected, wrong, errors = (
        Corrected(base),
        {Regime.DECODE_ONLY: 1.4, Regime.MIXED: 1.0, Regime.PREFILL_ONLY: 0.7},
        [],
    )
    for n in range(1_200):
        shape = some_shape(random) if n % 4 else BatchShape(decodes=8, decode_context=4_000)
        speed = 1.5 if n // 150 % 2 else 1.0
        exec_s = speed * wrong[Regime.of(shape)] * base.batch_s(shape) * random.uniform(0.95, 1.05)
        predicted_s = corrected.gammas[Regime.of(shape)] * base.batch_s(shape)
        errors.append(abs(predicted_s / exec_s - 1))
        corrected.observe(shape, exec_s)
    assert sum(errors[300:]) / 900 < 0.06, f"seed {seed}"


def test_one_stalled_iteration_does_not_spoil_a_settled_correction() -> None:
    base = load("a100-llama3-8b")
    corrected, shape = Corrected(base), BatchShape(decodes=10, decode_context=10_000)
    for _ in range(100):
        corrected.observe(shape, base.batch_s(shape))
    corrected.observe(shape, 60.0)
    assert corrected.batch_s(shape) < 1.35 * base.batch_s(shape)


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


def test_what_an_exact_profile_taught_weighs_the_same_whichever_way_it_was_counted() -> None:
    """Iterations that took just what the base says are digested by a shortcut; a hair of difference
    takes the long way.
    """
    base = load("a100-llama3-8b")
    shapes = [
        BatchShape(decodes=20 + n % 7, decode_context=9000 + 100 * n).with_chunk(64 * (n % 3), 0)
        for n in range(60)
    ]
    short, long = Corrected(base), Corrected(base)
    for n, shape in enumerate(shapes):
        exact_s = base.batch_s(shape)
        short.observe(shape, exact_s)
        long.observe(shape, exact_s * (1 + 1e-9))
        assert (short.residual, short.bias) == pytest.approx(
            (long.residual, long.bias), abs=1e-8
        ), n
    for shape in shapes:
        for profile in (short, long):
            profile.observe(shape, 1.1 * base.batch_s(shape))
        assert short.gammas == pytest.approx(long.gammas, rel=1e-6)
        assert short.batch_s(shape) == pytest.approx(long.batch_s(shape), rel=1e-6)
        assert (short.residual, short.bias) == pytest.approx(
            (long.residual, long.bias), rel=1e-5, abs=1e-8
        )


@pytest.mark.parametrize("seed", range(4))
def test_a_prediction_covers_what_passes_between_two_iterations(seed: int) -> None:
    """The time from one end to the next is predicted, whatever the iteration holds."""
    random, base = Random(seed), load("a100-llama3-8b")
    corrected, wrong_s = Corrected(base), []
    for n in range(400):
        shape, late_s = some_shape(random), random.uniform(0.001, 0.003)
        whole_s = base.batch_s(shape) + late_s
        if n > 50:
            wrong_s.append(corrected.batch_s(shape) - whole_s)
        corrected.observe(shape, base.batch_s(shape), late_s)
    assert all(gamma == 1.0 for gamma in corrected.gammas)
    assert 0 < sum(wrong_s) / len(wrong_s) < 0.001, f"seed {seed}"


def test_a_stall_between_two_iterations_says_little_about_the_next() -> None:
    base = load("a100-llama3-8b")
    corrected, shape = Corrected(base), BatchShape(decodes=10, decode_context=10_000)
    for _ in range(100):
        corrected.observe(shape, base.batch_s(shape))
    corrected.observe(shape, base.batch_s(shape), 5.0)
    assert corrected.batch_s(shape) < 1.2 * base.batch_s(shape)


def test_a_correction_that_has_seen_nothing_is_its_base() -> None:
    base = load("a100-llama3-8b")
    corrected, shape = (
        Corrected(base),
        BatchShape(decodes=7, decode_context=7_000).with_chunk(100, 50),
    )
    assert corrected.name == base.name
    assert corrected.batch_s(shape) == base.batch_s(shape)
    assert corrected.residual == 0
