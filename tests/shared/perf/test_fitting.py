"""A worker measures its engine and fits its own profile: what the fit promises, how it is measured,
and how it travels.
"""

import asyncio
import functools
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from services.worker import service as worker
from services.worker.engine import Engine, EngineFacts, EngineState, Outcome
from services.worker.engines.sim.engine import SimEngine
from services.worker.profiling import Measurement, fit_engine
from shared import subjects
from shared.bus import codec
from shared.bus.api import Call
from shared.core.announced import as_announced, profile_of
from shared.core.worker.step import Load, Work
from shared.errors import ConfigError, PeerError
from shared.perf import profile_file as store
from shared.perf.fitting import LEAST, Timed, coefficients, error_of, fit, non_negative
from shared.perf.forms import Attention, PiecewiseTokens, TokenTable
from shared.perf.iteration_time import Profile
from shared.perf.profile_file import ProfileFile
from shared.perf.shape import BatchShape
from shared.schemas import Announce, Selection
from shared.telemetry import conventions as names
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry
from shared.vocabulary import ReplicaId, Slot
from tests.fleet.protocol.world import CALM, Scene, World
from tests.rings import slow_but
from tests.simulated.virtual_loop import run_virtual

TRUE = PiecewiseTokens(
    tile=1,
    knots=(0, 32),
    slopes=(2e-5, 3e-5),
    c=0.003,
    attention=Attention(e=0.001, p1=8e-8, p2=6e-8, d0=0.0005, d1=0.0003, d2=1.5e-6),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


def drawn(rng: random.Random, n: int) -> list[BatchShape]:
    """Batches of all three regimes, of every size."""
    shapes = []
    for i in range(n):
        decodes = 0 if i % 3 == 0 else rng.choice((1, 3, 10, 32))
        shape = BatchShape(decodes=decodes, decode_context=decodes * rng.randint(1, 1500))
        for _ in range(0 if i % 3 == 1 else rng.randint(1, 3)):
            shape = shape.with_chunk(round(math.exp(rng.uniform(0, 6.5))), rng.randint(0, 1000))
        shapes.append(shape)
    return shapes


def timed(
    shapes: list[BatchShape], noise: float, rng: random.Random, stalls: float = 0.0
) -> list[Timed]:
    profile = TRUE.profile("true", 0.0)
    timings = []
    for shape in shapes:
        times = rng.uniform(1 - noise, 1 + noise) * (10 if rng.random() < stalls else 1)
        timings.append(Timed(shape, times * profile.batch_s(shape)))
    return timings


def file_of(timings: list[Timed]) -> ProfileFile:
    return fit(
        timings, name="mine", gpu="cpu", model="m", kv_capacity_tokens=100, provenance="test"
    )


# ---------------------------------------------------------------- the fit


@pytest.mark.parametrize("seed", slow_but([0], range(5)))
@pytest.mark.parametrize(
    ("noise", "stalls", "within"), [(0.0, 0.0, 0.01), (0.05, 0.0, 0.03), (0.05, 0.08, 0.05)]
)
def test_a_fit_predicts_batches_it_has_not_seen_although_times_scatter_and_some_iterations_stalled(
    seed: int, noise: float, stalls: float, within: float
) -> None:
    rng = random.Random(seed)
    file = file_of(timed(drawn(rng, 250), noise, rng, stalls))
    profile, true = file.profile(), TRUE.profile("true", 0.0)
    off = [abs(profile.batch_s(shape) / true.batch_s(shape) - 1) for shape in drawn(rng, 300)]
    assert sum(off) / len(off) < within, f"seed {seed}"


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_a_verified_draft_has_a_price_beyond_that_of_a_token(seed: int) -> None:
    rng = random.Random(seed)
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
    assert file.coefficients.attention.v == pytest.approx(0.0004, rel=0.15), f"seed {seed}"
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


def test_the_same_timings_give_the_same_file() -> None:
    rng = random.Random(3)
    timings = timed(drawn(rng, 120), 0.2, rng)
    assert file_of(timings) == file_of(list(timings))


@given(st.integers(0, 2**32), st.integers(LEAST, 90))
@settings(deadline=None, max_examples=25)
def test_whatever_was_measured_the_fit_is_finite_rises_and_can_be_announced(
    seed: int, n: int
) -> None:
    rng = random.Random(seed)
    file = file_of([Timed(shape, math.exp(rng.uniform(-9, 2))) for shape in drawn(rng, n)])
    form = file.coefficients
    assert isinstance(form, PiecewiseTokens)
    assert min(msgspec.structs.astuple(form.attention)) >= 0
    assert min(np.cumsum(form.slopes)) >= -1e-12
    assert file.profile().batch_s(BatchShape(decodes=1)) > 0
    assert profile_of(announce(file)).batch_s(BatchShape(decodes=1)) == file.profile().batch_s(
        BatchShape(decodes=1)
    )


@given(st.integers(0, 2**32))
def test_no_small_step_within_bounds_improves_a_non_negative_solution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(30, 8)) * 10.0 ** rng.integers(-6, 6, 8), rng.normal(size=30)
    if seed % 2:
        a[:, 3] = a[:, 2]
    x = non_negative(a, b)
    assert x.min() >= 0
    gradient = a.T @ (a @ x - b) / np.linalg.norm(a, axis=0)
    assert gradient.min() > -1e-7
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-7


def test_too_few_timings_and_impossible_ones_are_refused() -> None:
    rng = random.Random(1)
    timings = timed(drawn(rng, LEAST), 0.0, rng)
    with pytest.raises(ValueError, match="too few"):
        file_of(timings[1:])
    with pytest.raises(ValueError, match="duration"):
        file_of([*timings[1:], Timed(timings[0].shape, 0.0)])


# ---------------------------------------------------------------- the measurement


class Hand:
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
        facts = EngineFacts(
            "sim",
            "My Model/7B",
            "cpu-tiny",
            kv_blocks,
            16,
            context_tokens,
            max_slots,
            300,
            frozenset({256}),
        )
        self._engine: Engine = SimEngine(
            facts, store.load("cpu-tiny"), wait=None, clock=lambda: 0.0, pace=pace
        )
        self.now_s, self.longest_s = 0.0, 0.0
        self._first_s, self._sizes = first_s, set[tuple[int, int]]()
        self.firsts = 0

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    def load(self, load: Load) -> None:
        self._engine.load(load)

    def execute(self, work: list[Work], selection: Selection | None) -> Outcome:
        outcome = self._engine.execute(work, selection)
        size = len(work), sum(entry.tokens for entry in work).bit_length()
        if self._first_s and size not in self._sizes:
            self._sizes.add(size)
            self.firsts += 1
            outcome = outcome._replace(exec_s=outcome.exec_s + self._first_s, unusual=True)
        self.now_s += outcome.exec_s + 1e-5
        self.longest_s = max(self.longest_s, outcome.exec_s)
        return outcome

    def preempt(self, slot: Slot) -> None:
        self._engine.preempt(slot)

    def release(self, slot: Slot) -> None:
        self._engine.release(slot)

    def snapshot(self) -> EngineState:
        return self._engine.snapshot()

    def close(self) -> None:
        self._engine.close()


@pytest.mark.parametrize("seed", slow_but([0], range(4)))
def test_a_measured_engine_is_predicted_well_left_empty_and_not_held_up(seed: int) -> None:
    hand = Hand()
    measurement = Measurement(hand, random.Random(seed))  # type: ignore[arg-type]
    timings = measurement.run(4.0, clock=lambda: hand.now_s)
    assert 4.0 <= hand.now_s <= 4.0 + hand.longest_s + 0.01
    assert hand.snapshot() == (2048, [], 0, 0)
    shapes = [one.shape for one in timings]
    assert {shape.decodes for shape in shapes} >= {0, 1, 8, 32}
    assert max(shape.prefill_tokens for shape in shapes) >= 512
    error = error_of(
        file_of(timings).profile(),
        [Timed(s, store.load("cpu-tiny").batch_s(s)) for s in drawn(random.Random(9), 200)],
        "drawn",
    )
    assert error.mape is not None
    assert error.mape < 0.05, f"seed {seed}"


@pytest.mark.parametrize("seed", slow_but([0], range(4)))
def test_what_an_engine_makes_ready_once_is_in_no_prediction(seed: int) -> None:
    """A GPU records a pass of a new size, for longer than the pass takes."""
    hand = Hand(first_s=0.1)
    timings = Measurement(hand, random.Random(seed)).run(4.0, clock=lambda: hand.now_s)  # type: ignore[arg-type]
    assert hand.firsts > 20
    assert 4.0 <= hand.now_s <= 8.0 + hand.longest_s + 0.01
    of_profile = store.load("cpu-tiny")
    for shape, exec_s in timings:
        assert exec_s == pytest.approx(of_profile.batch_s(shape), rel=0.1)
    error = error_of(
        file_of(timings).profile(),
        [Timed(s, of_profile.batch_s(s)) for s in drawn(random.Random(9), 200)],
        "drawn",
    )
    assert error.mape is not None
    assert error.mape < 0.05, f"seed {seed}"


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
@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_small_and_slow_engines_are_measured_within_their_bounds(
    kv_blocks: int, max_slots: int, context_tokens: int, pace: float, seed: int
) -> None:
    """The engine asserts that nothing goes over its slots, blocks or context."""
    hand = Hand(kv_blocks=kv_blocks, max_slots=max_slots, context_tokens=context_tokens, pace=pace)
    measurement = Measurement(hand, random.Random(seed))  # type: ignore[arg-type]
    measurement.run(2.0, clock=lambda: hand.now_s)
    assert hand.snapshot() == (kv_blocks, [], 0, 0)
    assert hand.now_s <= 2.0 + hand.longest_s + 0.01
    assert hand.longest_s <= max(0.5, 80 * 0.00065 * pace)


def test_an_engine_too_slow_to_be_measured_keeps_its_default() -> None:
    slow = Hand(pace=100.0)
    assert fit_engine(slow, 4.0, clock=lambda: slow.now_s) is None  # type: ignore[arg-type]


def test_a_fitted_file_is_named_after_the_model_and_can_be_stored_and_read() -> None:
    hand = Hand()
    file = fit_engine(hand, 3.0, clock=lambda: hand.now_s)  # type: ignore[arg-type]
    assert file is not None
    assert file.name == "fitted-my-model-7b"
    assert file.kv_capacity_tokens == 2048 * 16
    assert msgspec.json.decode(msgspec.json.encode(file), type=ProfileFile) == file


# ---------------------------------------------------------------- how it travels


def announce(fitted: ProfileFile | None, profile: str = "cpu-tiny") -> Announce:
    return Announce(
        replica=ReplicaId("r1"),
        incarnation="1",
        at_unix_s=0.0,
        model="m",
        engine="torch",
        profile=profile,
        pool="",
        kv_blocks=64,
        block_tokens=16,
        context_tokens=512,
        max_slots=8,
        epoch=0,
        fitted=fitted,
    )


FITTED = file_of(timed(drawn(random.Random(11), 200), 0.05, random.Random(12)))


def test_an_announced_fit_arrives_as_it_was_and_is_about_a_kilobyte() -> None:
    payload = msgspec.msgpack.encode(announce(FITTED))
    assert len(payload) < 1400
    arrived = msgspec.msgpack.decode(payload, type=Announce)
    shapes = drawn(random.Random(2), 50)
    assert [profile_of(arrived).batch_s(s) for s in shapes] == [
        FITTED.profile().batch_s(s) for s in shapes
    ]


def test_without_a_fit_the_name_counts() -> None:
    assert profile_of(announce(None)).name == "cpu-tiny"
    with pytest.raises(ConfigError, match="no profile named"):
        profile_of(announce(None, "none-such"))


def test_a_path_is_not_opened_and_its_worker_announces_the_profile_itself(tmp_path: Path) -> None:
    fifo = tmp_path / "profile.json"
    os.mkfifo(fifo)  # whoever opened it would wait for ever
    with pytest.raises(ConfigError, match="no profile named"):
        profile_of(announce(None, str(fifo)))
    own = tmp_path / "own.json"
    own.write_bytes(msgspec.json.encode(FITTED))
    assert as_announced(str(own)) == (FITTED.name, FITTED)
    assert as_announced("cpu-tiny") == ("cpu-tiny", None)


FORM = FITTED.coefficients
assert isinstance(FORM, PiecewiseTokens)
NOTHING = Attention(e=0.0, p1=0.0, p2=0.0, d0=0.0, d1=0.0, d2=0.0)
NONSENSE = {
    "no time at all": replace(
        FITTED,
        coefficients=PiecewiseTokens(tile=1, knots=(0,), slopes=(0.0,), c=-1.0, attention=NOTHING),
    ),
    "not a number": replace(FITTED, coefficients=replace(FORM, c=math.nan)),
    "not a number, hidden": replace(
        FITTED, coefficients=replace(FORM, attention=replace(FORM.attention, p1=math.nan))
    ),
    "endless": replace(
        FITTED, coefficients=replace(FORM, attention=replace(FORM.attention, d1=math.inf))
    ),
    "endless drafts": replace(
        FITTED, coefficients=replace(FORM, attention=replace(FORM.attention, v=1e300))
    ),
    "a year": replace(FITTED, overhead_s=3e7),
    "as long as a book": replace(FITTED, provenance=20_000 * "a"),
    "many knots": replace(
        FITTED, coefficients=replace(FORM, knots=tuple(range(1000)), slopes=(0.0,) * 1000)
    ),
    "a wide tile": replace(FITTED, coefficients=replace(FORM, tile=2**62)),
    # two points, and a million between them
    "a long table": replace(
        FITTED,
        coefficients=TokenTable(
            table_tokens=(0, 1_000_000), table_seconds=(0.1, 0.2), attention=NOTHING
        ),
    ),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_fit_that_no_worker_would_send_is_refused(kind: str) -> None:
    sent = msgspec.msgpack.encode(announce(NONSENSE[kind]))
    with pytest.raises((PeerError, ConfigError)):
        profile_of(codec.decode(Announce, sent, json=False))


def test_a_fit_that_is_refused_is_not_unfolded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request may ask for it."""
    unfolded: list[ProfileFile] = []
    profile = ProfileFile.profile

    def counted(file: ProfileFile) -> Profile:
        unfolded.append(file)
        return profile(file)

    monkeypatch.setattr(ProfileFile, "profile", counted)
    endless = replace(FITTED, name="endless", overhead_s=3e7)
    for _ in range(3):
        with pytest.raises(ConfigError, match="no durations"):
            profile_of(announce(endless))
    assert len(unfolded) == 1


def metrics_of(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(exposition([registry], "")[1])
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_a_fleet_plans_by_what_its_workers_fitted_and_a_worker_that_was_fenced_keeps_its_fit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is paused until it is declared lost; a stranger announces fits that are none all
    the time.
    """
    announced: dict[str, list[Announce]] = {}
    registries = [Registry(), Registry()]
    serve, given = worker.serve, iter(registries)
    fitted = replace(FITTED, name="fitted-here")

    async def with_fit(*args: object, **kwargs: object) -> None:
        args[3].fitted = fitted  # type: ignore[attr-defined]
        served = functools.partial(serve, metrics=next(given))  # type: ignore[arg-type]
        await served(*args, **kwargs)

    monkeypatch.setattr(worker, "serve", with_fit)

    def heard(one: Announce, _: Call) -> None:
        announced.setdefault(one.replica, []).append(one)

    async def disturb(world: World) -> None:
        await asyncio.sleep(1.0)
        world.processes["worker-r0"].pause()
        for kind in NONSENSE.values():
            await asyncio.sleep(1.0)
            stranger = replace(announce(kind), replica=ReplicaId("x1"), incarnation="stranger")
            world.net.inject(
                subjects.announce(ReplicaId("x1")), msgspec.msgpack.encode(stranger), {}
            )
        world.processes["worker-r0"].resume()

    async def main() -> None:
        world = World(
            Scene(faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, planners=1, requests=20),
            seed,
        )
        await world.net.connect("watch").subscribe(subjects.ANNOUNCEMENTS, Announce, heard)
        disturbed = asyncio.ensure_future(disturb(world))
        await world.play()
        await disturbed
        ours = [one for replica in ("r0", "r1") for one in announced[replica]]
        assert {(one.profile, one.fitted) for one in ours} == {("fitted-here", fitted)}
        assert len({one.incarnation for one in announced["r0"]}) > 1, (
            f"seed {seed}: it was not fenced"
        )
        counted = [metrics_of(registry) for registry in registries]
        made = sum(len(seen.tokens) for seen in world.seen.values())
        r0, r1 = (("replica", "r0"),), (("replica", "r1"),)
        generated = sum(
            one[names.GENERATION_TOKENS, (("model_name", "m"), *replica)]
            for one, replica in zip(counted, (r0, r1), strict=True)
        )
        assert generated >= made > 0  # what a lost worker made last is made again
        for one, replica in zip(counted, (r0, r1), strict=True):
            assert one[names.FIT_ERROR, (("regime", "all"), *replica)] == fitted.error.mape
            assert one[names.HELD_REQUESTS, replica] == 0
            assert one[f"{names.ITERATION}_count", replica] > 0
            assert one[names.KV_FREE_BLOCKS, replica] == 400
        planned = metrics_of(world.planners[0].metrics)
        for name in ("r0", "r1"):
            label = ("replica", name)
            assert planned[names.ACKS, (label,)] > 0
            assert planned[names.RESIDUAL, (label,)] >= 0
            assert (
                1 / 16
                <= planned[names.GAMMA, tuple(sorted((label, ("regime", "decode_only"))))]
                <= 16
            )
        assert sum(planned[names.PLANS, (("replica", r),)] for r in ("r0", "r1")) >= made / 32

    run_virtual(main())


def test_a_seat_is_taken_anew_when_the_worker_measured_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that comes back at once with another fit is planned by that fit."""
    files = iter([FITTED, replace(FITTED, name="fitted-again")])
    serve, seats = worker.serve, list[str]()

    async def with_fit(*args: object, **kwargs: object) -> None:
        args[3].fitted = next(files)  # type: ignore[attr-defined]
        await serve(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "serve", with_fit)

    async def main() -> None:
        world = World(
            Scene(
                faults=CALM,
                kills=0,
                pauses=0,
                restarts=0,
                cancels=0,
                planners=1,
                replicas=1,
                requests=10,
            ),
            1,
        )

        async def restart() -> None:
            await asyncio.sleep(1.0)
            seats.append(next(iter(world.planners[0]._planners.values())).core._profile.name)
            world.processes["worker-r0"].kill()
            await asyncio.sleep(8.0)
            seats.append(next(iter(world.planners[0]._planners.values())).core._profile.name)

        restarted = asyncio.ensure_future(restart())
        await world.play()
        await restarted

    run_virtual(main())
    assert seats == ["mine", "fitted-again"]
