"""Tests of the simulator's virtual worker: it does what a real worker and its engine do."""

from array import array
from random import Random

from hypothesis import given
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
from shared.rules.tiers import DEMO_3
from shared.schemas import BatchPlan, Hold, OfferAccepted, PlanAck, Resume, Selection
from shared.text.tokenizer import Tokenizer
from tests import made
from tests.fleet.protocol.test_drivers_agree import ANNOUNCE, DRAFT, PROFILE, engine
from tests.shared.core.placed_record import placed


class Both:
    """A virtual worker, and a real one with its engine, that get the same holds and plans."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now_s, self.seq = rng, 0.0, 0
        self.virtual = VirtualWorker(ANNOUNCE, PROFILE.batch_s, DRAFT, Acceptance())
        self.real = made.worker_core(
            ANNOUNCE.replica, "1", kv_blocks=1200, context_tokens=8192, max_slots=64
        )
        self.engine, self.processor = engine(), OutputProcessor(Tokenizer.builtin())
        self.held = set[int]()
        # what the real engine did
        self.tokens = self.drafted = self.accepted = self.verifications = 0

    def hold(self, slot: int) -> None:
        """Hold a new request; some have tokens that another replica made."""
        rng = self.rng
        prompt, output, made = (
            rng.randint(1, 40),
            rng.randint(1, 30),
            rng.choice([0, 0, rng.randint(0, 20)]),
        )
        planned = PlannedRequest(
            self.seq * 64 + slot, 0.0, prompt, output + made, "interactive", 1.0, "t", "app"
        )
        record, body = stored_as(planned, DEMO_3, PROFILE, 8192, 1024, 0.0)
        body = replace(body, prompt=bytes(4 * prompt))
        measure = Measure.begin(record.slo, 0.0)
        measure = measure.emit(made, 0.0, record.slo) if made else measure
        record = replace(record, resume=Resume(tokens=bytes(4 * made), measure=measure))
        record = placed(record, ANNOUNCE.replica, "1")
        hold = Hold(epoch=1, sync=1, slot=slot, key=record.key, attempt=record.attempt)
        self.virtual.hold(hold, record, body, array("d", [0.0] * made))
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
        assert [(o.key, o.why, o.resume.measure) for o in overs] == [
            (o.key, o.why, o.resume.measure) for o in finished.overs
        ]
        self.held -= {slot for slot, _ in ack.ended}
        self.tokens += sum(len(did.tokens) for did in done)
        for did in done:
            if did.drafted:
                self.drafted += did.drafted
                self.accepted += did.computed - 1
                self.verifications += 1
        self.real.check()
        self.virtual.check()


def facts_of(ack: PlanAck) -> tuple[object, ...]:
    """The fields of an ack that a planner uses."""
    return (
        ack.plan_seq,
        ack.slots,
        ack.computed,
        ack.emitted,
        ack.drafted,
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
