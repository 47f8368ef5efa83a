"""Tests of how a worker measures its engine and fits a profile, its model of iteration times."""

import random

import msgspec
import pytest

from services.worker.engine import Outcome
from services.worker.engines.profiling import Measurement, fit_engine
from services.worker.engines.sim.engine import SimEngine
from shared.core.worker.step import Work
from shared.perf import profile_file as store
from shared.perf.fitting import Timed, error_of
from shared.perf.profile_file import ProfileFile
from shared.schemas import Selection
from tests import made
from tests.shared.perf.timings import drawn, file_of

CPU = store.load("cpu-tiny")


class Hand(SimEngine):
    """An engine that takes the time a profile says, on a clock that nothing else moves. The first
    batch of each size, tokens to the next power of two, takes `first_s` more.
    """

    def __init__(
        self,
        *,
        kv_blocks: int = 2048,
        max_slots: int = 1024,
        context_tokens: int = 2048,
        pace: float = 1.0,
        first_s: float = 0.0,
    ) -> None:
        facts = made.engine_facts(
            model="My Model/7B",
            profile="cpu-tiny",
            kv_blocks=kv_blocks,
            context_tokens=context_tokens,
            max_slots=max_slots,
            eos_token_ids=frozenset({256}),
        )
        super().__init__(facts, CPU, wait=None, clock=lambda: 0.0, pace=pace)
        self.now_s, self.longest_s = 0.0, 0.0
        self._first_s, self._sizes = first_s, set[tuple[int, int]]()
        self.firsts = 0

    def execute(self, work: list[Work], selection: Selection | None) -> Outcome:
        outcome = super().execute(work, selection)
        size = len(work), sum(entry.tokens for entry in work).bit_length()
        if self._first_s and size not in self._sizes:
            self._sizes.add(size)
            self.firsts += 1
            outcome = outcome._replace(exec_s=outcome.exec_s + self._first_s, unusual=True)
        self.now_s += outcome.exec_s + 1e-5
        self.longest_s = max(self.longest_s, outcome.exec_s)
        return outcome


def mean_error(timings: list[Timed]) -> float:
    """The mean error of the profile that is fitted to `timings`, over batches drawn anew."""
    true = [Timed(s, CPU.batch_s(s)) for s in drawn(random.Random(9), 200)]
    mape = error_of(file_of(timings).profile(), true, "drawn").mape
    assert mape is not None
    return mape


def test_a_measured_engine_is_predicted_well_left_empty_and_not_held_up() -> None:
    hand = Hand()
    measurement = Measurement(hand, random.Random(0))
    timings = measurement.run(4.0, clock=lambda: hand.now_s)
    assert 4.0 <= hand.now_s <= 4.0 + hand.longest_s + 0.01
    assert hand.snapshot() == (2048, [], 0, 0)
    shapes = [one.shape for one in timings]
    assert {shape.decodes for shape in shapes} >= {0, 1, 8, 32}
    assert max(shape.prefill_tokens for shape in shapes) >= 512
    assert mean_error(timings) < 0.05


def test_what_an_engine_makes_ready_once_is_in_no_prediction() -> None:
    """A GPU records a pass of a new size, for longer than the pass takes."""
    hand = Hand(first_s=0.1)
    timings = Measurement(hand, random.Random(0)).run(4.0, clock=lambda: hand.now_s)
    assert hand.firsts > 20
    assert 4.0 <= hand.now_s <= 8.0 + hand.longest_s + 0.01
    for shape, exec_s in timings:
        assert exec_s == pytest.approx(CPU.batch_s(shape), rel=0.1)
    assert mean_error(timings) < 0.05


@pytest.mark.parametrize(
    ("kv_blocks", "max_slots", "context_tokens", "pace"),
    [
        (2048, 1024, 64, 1.0),
        (40, 1024, 2048, 1.0),
        (4, 4, 64, 1.0),
        (2048, 1, 2048, 1.0),
        (2048, 3, 500, 1.0),
        (2048, 1024, 2048, 30.0),
    ],
)
def test_small_and_slow_engines_are_measured_within_their_bounds(
    kv_blocks: int, max_slots: int, context_tokens: int, pace: float
) -> None:
    """The engine asserts that nothing goes over its slots, blocks or context."""
    hand = Hand(kv_blocks=kv_blocks, max_slots=max_slots, context_tokens=context_tokens, pace=pace)
    measurement = Measurement(hand, random.Random(0))
    measurement.run(2.0, clock=lambda: hand.now_s)
    assert hand.snapshot() == (kv_blocks, [], 0, 0)
    assert hand.now_s <= 2.0 + hand.longest_s + 0.01
    assert hand.longest_s <= max(0.5, 80 * 0.00065 * pace)


def test_an_engine_too_slow_to_be_measured_keeps_its_default() -> None:
    slow = Hand(pace=100.0)
    assert fit_engine(slow, 4.0, clock=lambda: slow.now_s) is None


def test_a_fitted_file_is_named_after_the_model_and_can_be_stored_and_read() -> None:
    hand = Hand()
    file = fit_engine(hand, 3.0, clock=lambda: hand.now_s)
    assert file is not None
    assert file.name == "fitted-my-model-7b"
    assert file.kv_capacity_tokens == 2048 * 16
    assert msgspec.json.decode(msgspec.json.encode(file), type=ProfileFile) == file
