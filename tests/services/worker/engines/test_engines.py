"""Tests of the sim engine: iterations take the predicted time, and outputs are the same always."""

import time
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine import Engine, EngineFacts
from services.worker.engines import draws
from services.worker.engines.sim.engine import ALLOWANCE_S, SimEngine
from shared.columns import pack
from shared.core.worker.step import Load, Work
from shared.perf.shape import BatchShape
from shared.schemas import Sampling, Selection
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot

SIM = EngineFacts("sim", "sim", "toy", 64, 16, 512, 16, 261, Tokenizer.builtin().eos_token_ids)


class Toy:
    """A profile with prefill apart from decode: 5 ms an iteration, 0.1 ms a token of a chunk,
    0.5 ms a decode, 1 us a cached token of a decode.
    """

    name = "toy"

    def batch_s(self, shape: BatchShape) -> float:
        return (
            5e-3 + 1e-4 * shape.prefill_tokens + 5e-4 * shape.decodes + 1e-6 * shape.decode_context
        )

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return limit


class Machine:
    """A made-up clock, and a sleep that wakes late."""

    def __init__(self, rng: Random) -> None:
        self.now_s, self._rng = 1000.0, rng

    def clock(self) -> float:
        return self.now_s

    def wait(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_s += duration_s + self._rng.choice([1e-4, 3e-4, 4e-3])


def sim(facts: EngineFacts = SIM, **options: Any) -> SimEngine:
    return SimEngine(facts, Toy(), **{"wait": None, "clock": time.monotonic, **options})


def load(
    engine: Engine,
    slot: int,
    tokens: Sequence[int],
    generated: int = 0,
    sampling: Sampling | None = None,
    seed: int = 1,
) -> None:
    engine.load(Load(Slot(slot), tokens, generated, sampling or Sampling(temperature=0.0), seed))


def run(engine: Engine, *work: tuple[int, int, bool]) -> list[list[int]]:
    return [
        list(done.tokens)
        for done in engine.execute(
            [Work(Slot(slot), n, emits) for slot, n, emits in work], None
        ).done
    ]


# ---------------------------------------------------------------- sim


@given(st.integers(0, 2**32))
def test_iterations_end_when_the_profile_says_however_late_python_is(seed: int) -> None:
    rng = Random(seed)
    machine = Machine(rng)
    engine = sim(wait=machine.wait, clock=machine.clock, pace=0.5)
    for slot in range(8):
        load(engine, slot, [1] * 20)
    began_s, predicted_s = machine.now_s, 0.0
    outcome = engine.execute([Work(Slot(slot), 20, True) for slot in range(8)], None)
    predicted_s += outcome.exec_s
    assert outcome.exec_s == pytest.approx(0.5 * (5e-3 + 1e-4 * 160))
    for _ in range(49):
        machine.now_s += rng.uniform(0.0, ALLOWANCE_S)  # detokenizing, logging, the next plan
        predicted_s += engine.execute([Work(Slot(slot), 1, True) for slot in range(8)], None).exec_s
    assert machine.now_s - began_s == pytest.approx(predicted_s, rel=0.02)


def test_a_plan_that_comes_late_is_not_forgiven() -> None:
    machine = Machine(Random(0))
    engine = sim(wait=machine.wait, clock=machine.clock)
    load(engine, 0, [1])
    engine.execute([Work(Slot(0), 1, True)], None)
    machine.now_s += 0.010
    handed_at_s = machine.now_s
    outcome = engine.execute([Work(Slot(0), 1, True)], None)
    assert machine.now_s - handed_at_s >= outcome.exec_s - 1e-9


def test_output_is_readable_and_the_same_after_a_preemption() -> None:
    engine = sim()
    load(engine, 0, [1] * 9, seed=42)
    out = run(engine, (0, 9, True))[0]
    for _ in range(99):
        out += run(engine, (0, 1, True))[0]
    text = bytes(out).decode()
    print(text)
    words = text.split()
    assert all(word.isalpha() and word.islower() and len(word) <= 7 for word in words)
    assert len(set(words)) > 10
    engine.release(Slot(0))
    load(engine, 0, [1] * 9 + out[:50], generated=50, seed=42)
    again = run(engine, (0, 59, True))[0]
    for _ in range(49):
        again += run(engine, (0, 1, True))[0]
    assert out[50:] == again


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_accepted_drafts_change_the_pace_but_not_the_text_and_rejected_ones_hold_no_kv(
    seed: int, cap: int
) -> None:
    plain, fast = sim(), sim(SIM._replace(draft=0.05))
    for engine in (plain, fast):
        load(engine, 0, [1] * 9, seed=seed)
    out = [run(engine, (0, 9, True))[0] for engine in (plain, fast)]
    for _ in range(60):
        out[0] += run(plain, (0, 1, True))[0]
    selection = Selection(method="chain", depth=pack([cap - 1]), width=pack([1]), budget_tokens=cap)
    steps, verified = 0, 0
    while len(out[1]) <= 60 - cap:
        done = fast.execute([Work(Slot(0), cap, True)], selection).done[0]
        assert done.drafted == cap - 1
        assert 1 <= done.computed == len(done.tokens) <= cap
        out[1] += done.tokens
        steps, verified = steps + 1, verified + len(done.tokens)
        assert fast.snapshot().free_blocks == SIM.kv_blocks - -(-(9 + verified) // SIM.block_tokens)
    assert out[1] == out[0][: len(out[1])]
    assert verified > steps


def test_drafting_takes_its_part_of_the_time_and_without_drafts_the_root_is_verified_alone() -> (
    None
):
    selection = Selection(method="chain", depth=pack([2, 0]), width=pack([1, 1]), budget_tokens=3)
    took_s = {}
    for draft in (0.0, 0.1):
        engine = sim(SIM._replace(draft=draft), pace=2.0)
        for slot, prompt in ((0, 10), (1, 40)):
            load(engine, slot, [1] * prompt)
        run(engine, (0, 10, True))
        outcome = engine.execute([Work(Slot(0), 3, True), Work(Slot(1), 16, False)], selection)
        took_s[draft] = outcome.exec_s
        assert [done.drafted for done in outcome.done] == [2 if draft else 0, 0]
    assert took_s[0.0] == pytest.approx(2 * (5e-3 + 16e-4 + 5e-4 + 10e-6))
    # first the whole context, which the draft has not seen
    drafting_s = 0.1 * (5e-3 + 11e-4) + 0.1 * (5e-3 + 5e-4 + 11e-6)
    verifying_s = 5e-4 + 10e-6 + 2e-4  # a decode, and two drafts
    assert took_s[0.1] == pytest.approx(2 * (5e-3 + 16e-4 + verifying_s + drafting_s))


# ---------------------------------------------------------------- draws


def test_draws_are_even_and_apart() -> None:
    values = [draws.uniform(seed, n) for seed in (-3, 0, 1, 2**63) for n in range(2000)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    counts = [sum(int(value * 10) == tenth for value in values) for tenth in range(10)]
    assert all(700 < count < 900 for count in counts)
