"""Tests of the simulator's virtual worker: it does what a real worker and its engine do."""

from array import array
from random import Random

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.traffic import stored_as
from loadgen.simulator.virtual_worker import VirtualWorker
from services.worker.output_processor import OutputProcessor
from services.worker.step_runner import run_step
from shared.columns import pack
from shared.measure import Measure
from shared.policy.acceptance import Acceptance
from shared.prefix import Piece, chain_of_pieces
from shared.rules.tiers import DEMO_3
from shared.schemas import BatchPlan, Hold, OfferAccepted, PlanAck, Resume, Selection
from shared.text.tokenizer import Tokenizer
from tests import made
from tests.fleet.protocol.test_drivers_agree import ANNOUNCE, DRAFT, PROFILE, engine
from tests.shared.core.placed_record import placed


class Both:
    """A virtual worker, and a real one with its engine, that get the same holds and plans. With
    `prefixes` prompts begin alike, the engine has a prefix cache, less KV than plans promise, and
    at times memory of its host.
    """

    def __init__(self, rng: Random, *, prefixes: bool = False) -> None:
        self.rng, self.now_s, self.seq, self.prefixes = rng, 0.0, 0, prefixes
        kv_blocks = rng.choice([60, 120, 240]) if prefixes else 1200
        host_kv_blocks = rng.choice([0, 20, 400]) if prefixes else 0
        announce = replace(
            ANNOUNCE, kv_blocks=kv_blocks, host_kv_blocks=host_kv_blocks, kv_load_s=1 / 1024
        )
        self.virtual = VirtualWorker(announce, PROFILE.batch_s, DRAFT, Acceptance())
        self.real = made.worker_core(
            ANNOUNCE.replica, "1", kv_blocks=kv_blocks, context_tokens=8192, max_slots=64
        )
        self.engine = engine(announce, prefix_caching=prefixes, clock=lambda: self.now_s)
        self.processor = OutputProcessor(Tokenizer.builtin())
        self.held = set[int]()
        # what the real engine did
        self.tokens = self.drafted = self.accepted = self.verifications = self.cached = 0
        self.lapsed = 0  # entries that had no room
        self.loaded_s = 0.0

    def text(self, number: int, made: int) -> tuple[list[Piece], list[int], list[int]]:
        """A prompt by its pieces and by its tokens, and tokens that were made before. What is the
        request's own is a piece of its own.
        """
        rng = self.rng
        pieces = [Piece(rng.randint(1, 3), rng.randint(1, 150)) for _ in range(rng.randint(0, 3))]
        pieces.append(Piece(-number, rng.randint(1, 40)))
        prompt = [t for piece, n in pieces for t in Random(piece).choices(range(256), k=n)]
        return pieces, prompt, Random(f"{number} made").choices(range(256), k=made)

    def hold(self, slot: int) -> None:
        """Hold a new request; some have tokens that another replica made."""
        rng, number = self.rng, self.seq * 64 + slot + 1
        output, made = rng.randint(1, 30), rng.choice([0, 0, rng.randint(0, 20)])
        pieces, tokens, before = self.text(number, made)
        if not self.prefixes:
            tokens = [0] * rng.randint(1, 40)
        prompt = len(tokens)
        planned = PlannedRequest(number, 0.0, prompt, output + made, "interactive", 1.0, "t", "app")
        record, body = stored_as(planned, DEMO_3, PROFILE, 8192, 1024, 0.0)
        body = replace(body, prompt=pack(tokens))
        measure = Measure.begin(record.slo, 0.0)
        measure = measure.emit(made, 0.0, record.slo) if made else measure
        record = replace(record, resume=Resume(tokens=pack(before), measure=measure))
        record = placed(record, ANNOUNCE.replica, "1")
        keep_s = rng.choice([0.0, 0.0, 1.0, 30.0])
        hold = Hold(
            epoch=1, sync=1, slot=slot, key=record.key, attempt=record.attempt, keep_s=keep_s
        )
        own = Piece(-number, output + made)
        chain = chain_of_pieces([*pieces, own]) if self.prefixes else ()
        self.virtual.hold(hold, record, body, array("d", [0.0] * made), chain)
        assert self.real.hold(hold, record, body, now_unix_s=self.now_s) == OfferAccepted()
        self.held.add(slot)

    def plan(self) -> BatchPlan:
        """A plan for some requests that are here and some that are not, with any caps and any
        speculation.
        """
        rng = self.rng
        slots = rng.sample(range(12), rng.randint(0, 10))
        caps = [rng.choice([1, 2, 4, 8, 50]) for _ in slots]
        here = sorted(self.held)
        released = rng.sample(here, min(len(here), rng.choice([0, 0, 0, 1])))
        preempted = [slot for slot in here if rng.random() < 0.03 and slot not in released]
        selection = None
        if rng.random() < 0.8:
            selection = Selection(
                method=rng.choice(["chain", "slo_then_throughput"]),
                depth=pack([rng.randint(0, 4) for _ in slots]),
                width=pack([rng.randint(1, 3) for _ in slots]),
                budget_tokens=rng.randint(0, 40),
                needed_limit_tokens=rng.randint(1, 6),
                lasts_s=rng.choice([0.0, 0.05, 1.0, 20.0]),
            )
        self.seq += 1
        return made.plan(
            slots,
            caps,
            replica=ANNOUNCE.replica,
            incarnation="1",
            seq=self.seq,
            predicted_s=0.0,
            released=pack(released),
            released_why=["dropped"] * len(released),
            preempted=pack(preempted),
            selection=selection,
        )

    def step(self) -> None:
        for slot in range(12):
            if slot not in self.held and self.rng.random() < 0.5:
                self.hold(slot)
        plan = self.plan()
        self.virtual.plan(plan)
        assert self.real.plan(plan) is None
        exec_s = self.virtual.begin(self.now_s)
        step = self.real.begin(now_unix_s=self.now_s)
        assert step is not None
        ran = run_step(self.engine, self.processor, step)
        done, real_s = ran.done, ran.exec_s
        assert exec_s is not None
        assert not step.work or real_s == exec_s
        self.virtual.check()
        self.now_s += exec_s
        times = {"started_unix_s": self.now_s - exec_s, "ended_unix_s": self.now_s, "idle_s": 0.0}
        ack, overs = self.virtual.finish(exec_s=exec_s, **times)
        finished = self.real.finish(ran._replace(exec_s=exec_s), **times)
        assert facts_of(ack) == facts_of(finished.ack)
        for one, other in zip(overs, finished.overs, strict=True):
            assert (one.key, one.why) == (other.key, other.why)
            assert one.resume.measure == other.resume.measure
            assert one.resume.cached_tokens == other.resume.cached_tokens
        self.held -= {slot for slot, _ in ack.ended}
        self.loaded_s += ack.loaded_s
        self.tokens += sum(len(did.tokens) for did in done)
        for did in done:
            self.cached += did.cached
            self.lapsed += not did.computed
            if did.drafted:
                self.drafted += did.drafted
                self.accepted += did.computed - 1
                self.verifications += 1
        self.real.check()
        self.virtual.check()
        self.engine.check()


def facts_of(ack: PlanAck) -> tuple[object, ...]:
    """The fields of an ack that a planner uses."""
    return (
        ack.plan_seq,
        ack.slots,
        ack.computed,
        ack.emitted,
        ack.drafted,
        ack.cached,
        ack.shared_blocks,
        ack.loaded_s,
        ack.ended,
        ack.skipped,
        ack.preempted,
    )


@given(st.integers(0, 1 << 32))
def test_the_virtual_worker_does_with_any_plans_what_the_real_one_and_its_engine_do(
    seed: int,
) -> None:
    both = Both(Random(seed))
    for _ in range(60):
        both.step()
    assert both.drafted > 20
    counted = both.virtual.counters
    assert counted.tokens == both.tokens
    assert counted.drafted == both.drafted
    assert (counted.accepted, counted.verifications) == (both.accepted, both.verifications)


@given(st.integers(0, 1 << 32))
@example(275)  # all but one token of a request that has begun elsewhere is found
def test_both_find_the_same_prefixes_and_evict_the_same(seed: int) -> None:
    both = Both(Random(seed), prefixes=True)
    for _ in range(60):
        both.step()
    assert both.cached > 0
    assert both.virtual.counters.tokens == both.tokens


def test_the_schedules_with_prefixes_have_entries_without_room() -> None:
    both = Both(Random(1), prefixes=True)
    for _ in range(400):
        both.step()
    assert both.cached > 1000 and both.lapsed > 20 and both.drafted > 20
    assert both.loaded_s > 1.0
