"""Tests that a core decides alike under the live and the simulated driver: the same events give the
same actions, and two loops around one core give the same plans.

The live half is a real WorkerCore with a real sim engine, so that the columns of the virtual worker
are held to both, speculation included.
"""

import asyncio
from array import array
from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.latency import Latency
from loadgen.simulator.timeline import Timeline
from loadgen.simulator.traffic import stored_as
from loadgen.simulator.virtual_replica import VirtualReplica
from services.worker.core.worker import WorkerCore
from services.worker.engines.sim.engine import SimEngine
from services.worker.output_processor import OutputProcessor
from services.worker.step_runner import run_step
from shared.clock import Clock
from shared.columns import pack, unpack_list
from shared.core.offer import as_offer
from shared.core.replica.events import (
    Acked,
    Answer,
    HoldDone,
    NeedResync,
    Offered,
    ReplicaAction,
    ReplicaEvent,
    ReplicaSettings,
    SendHold,
    SendPlan,
    Synced,
)
from shared.core.replica.replica import ReplicaCore
from shared.core.worker.step import Finished
from shared.measure import Measure
from shared.perf import profile_file as store
from shared.perf.draft import draft_of
from shared.perf.iteration_time import Profile
from shared.policy import registry
from shared.policy.acceptance import Acceptance
from shared.policy.seam import Policy
from shared.prefix import Chain, chain_of
from shared.process.drive import Inbox, drive
from shared.rules.tiers import DEMO_3, Tier, TierSet
from shared.schemas import Announce, AttemptOver, BatchPlan, Body, Hold, OfferAccepted, Record
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import RequestKey, Slo
from tests import made
from tests.shared.core.placed_record import placed
from tests.shared.policy.speculating import CHAIN, TREE, Speculating
from tests.simulated.virtual_loop import run_virtual

ANNOUNCE = made.announce(
    incarnation="1", engine="virtual", kv_blocks=1200, context_tokens=8192, max_slots=64
)
PROFILE: Profile = store.load("a100-llama3-8b")
THINKER, BROODER = (
    Tier(slo=Slo(ttft_s=2.0, thinking_tbt_s=0.03, tbt_s=0.1)),
    Tier(slo=Slo(thinking_tbt_s=0.1, ttlt_s=60.0)),
)
TIERS = replace(DEMO_3, tiers={**DEMO_3.tiers, "thinker": THINKER, "brooder": BROODER})
DRAFT = draft_of(PROFILE, 0.05)
FACTS = made.engine_facts(
    kv_blocks=1200, context_tokens=8192, max_slots=64, vocabulary=261, draft=0.05
)
SPECULATING = {"chain": CHAIN, "tree": TREE}
POLICIES = [*registry.names(), *SPECULATING]
# seq, slots, caps, predicted_s, preempted, came at
Plan = tuple[int, list[int], list[int], float, list[int], float]

Over = tuple[RequestKey, str, Measure]
Step = tuple[float, ReplicaEvent, list[ReplicaAction]]


def requests(
    seed: int, tiers: TierSet = TIERS, *, prefixes: bool = False
) -> list[tuple[float, Record, Body]]:
    """Requests in order of arrival. With `prefixes` most prompts begin like others."""
    rng, at_s, made = Random(seed), 0.0, []
    for number in range(40):
        at_s += rng.expovariate(9.0)
        tier = rng.choice(list(tiers.tiers))
        planned = PlannedRequest(
            number,
            at_s,
            rng.randint(1, 3000),
            rng.randint(1, 60),
            tier,
            rng.choice([1.0, 10.0]),
            "t",
            "app",
        )
        planned = planned._replace(thinking_tokens=rng.randint(0, planned.output_tokens))
        record, body = stored_as(planned, tiers, PROFILE, 8192, 1024, at_s)
        begins, tokens = Random(number % 5 if prefixes else number), planned.prompt_tokens
        text = begins.choices(range(256), k=min(tokens, 600))
        text += Random(f"own {number}").choices(range(256), k=tokens - len(text))
        body = replace(body, prompt=pack(text))  # for the real worker
        made.append((at_s, placed(record, ANNOUNCE.replica, "1"), body))
    return made


def make(policy: str) -> Policy:
    if policy in SPECULATING:
        return Speculating(**SPECULATING[policy])  # type: ignore[arg-type]
    return registry.make(policy)


def engine(
    announce: Announce = ANNOUNCE,
    *,
    prefix_caching: bool = False,
    clock: Callable[[], float] = lambda: 0.0,
) -> SimEngine:
    facts = FACTS._replace(
        kv_blocks=announce.kv_blocks,
        host_kv_blocks=announce.host_kv_blocks,
        kv_load_s=announce.kv_load_s,
    )
    return SimEngine(facts, PROFILE, wait=None, clock=clock, prefix_caching=prefix_caching)


def plan_of(plan: BatchPlan, now_s: float) -> Plan:
    return (
        plan.seq,
        unpack_list(plan.slots),
        unpack_list(plan.caps),
        plan.predicted_s,
        unpack_list(plan.preempted),
        now_s,
    )


class Around:
    """The fleet around a virtual replica: it answers the replica and keeps what it did."""

    def __init__(self, made: list[tuple[float, Record, Body]]) -> None:
        self.records = {record.key: record for _, record, _ in made}
        self.bodies = {record.key: body for _, record, body in made}
        self.overs: list[Over] = []
        self.declined: list[
            RequestKey
        ] = []  # their requests go nowhere else: there is no fleet here
        self.times = {record.key: array("d") for _, record, _ in made}
        self.prefixes = False

    def record(self, key: RequestKey) -> Record:
        return self.records[key]

    def body(self, key: RequestKey) -> Body:
        return self.bodies[key]

    def chain(self, key: RequestKey) -> Chain:
        if not self.prefixes:
            return ()
        # nobody else has its output
        output = Random(key).choices(range(256), k=60)
        return chain_of([*unpack_list(self.bodies[key].prompt), *output])

    def token_times(self, key: RequestKey) -> "array[float]":
        return self.times[key]

    def computed(self, replica: VirtualReplica, key: RequestKey, hashes: int) -> None:
        raise AssertionError("nothing goes on elsewhere")

    def fetch(self, replica: VirtualReplica, hold: Hold, then: Callable[[Hold, int], None]) -> None:
        then(hold, 0)

    def over(self, replica: VirtualReplica, over: AttemptOver) -> None:
        self.overs.append((over.key, over.why, over.resume.measure))

    def answered(self, key: RequestKey, accepted: bool) -> None:
        if not accepted:
            self.declined.append(key)

    @property
    def done(self) -> bool:
        return len(self.overs) + len(self.declined) == len(self.records)


def virtual(
    policy: str,
    seed: int,
    latency: Latency,
    tiers: TierSet = TIERS,
    *,
    announce: Announce = ANNOUNCE,
    prefixes: bool = False,
) -> tuple[list[Plan], list[Over], list[Step]]:
    made, line = requests(seed, tiers, prefixes=prefixes), Timeline()
    plans, log = list[Plan](), list[Step]()
    around = Around(made)
    around.prefixes = prefixes
    replica = VirtualReplica(
        announce,
        make(policy),
        PROFILE,
        DRAFT,
        Acceptance(),
        line,
        latency,
        Random(seed),
        around,
        hand_back=True,
        batch_s=PROFILE.batch_s,
        engine_draft=DRAFT,
    )
    inner, inner_plan = replica.core.handle, replica.worker.plan

    def handle(event: ReplicaEvent, *, now_unix_s: float) -> list[ReplicaAction]:
        actions = inner(event, now_unix_s=now_unix_s)
        log.append((now_unix_s, event, actions))
        return actions

    def plan(plan: BatchPlan) -> None:
        plans.append(plan_of(plan, line.now_s))
        inner_plan(plan)

    replica.core.handle, replica.worker.plan = handle, plan  # type: ignore[method-assign]
    for at_s, record, _ in made:
        line.at(
            at_s,
            replica.offer,
            as_offer(record, record.service_class),
            lambda answer, key=record.key: around.answered(key, isinstance(answer, OfferAccepted)),
        )
    while not around.done:
        line.step()
    return plans, around.overs, log


class LiveLoop:
    """The driver of the services, with messages that take time."""

    def __init__(
        self,
        policy: str,
        seed: int,
        latency: Latency,
        tiers: TierSet = TIERS,
        *,
        announce: Announce = ANNOUNCE,
        prefixes: bool = False,
    ) -> None:
        self.made, self.latency = requests(seed, tiers, prefixes=prefixes), latency
        self.announce = announce
        self.around = Around(self.made)
        settings = ReplicaSettings(depth=latency.depth, lead_s=latency.lead_s)
        self.core = ReplicaCore(make(policy), PROFILE, epoch=1, settings=settings, draft=DRAFT)
        self.worker = WorkerCore(
            announce.replica,
            "1",
            kv_blocks=announce.kv_blocks,
            block_tokens=16,
            context_tokens=8192,
            max_slots=announce.max_slots,
        )
        self.engine = engine(announce, prefix_caching=prefixes)
        self.processor, self.cached = OutputProcessor(Tokenizer.builtin()), 0
        self.plans: list[Plan] = []
        self.came_s: dict[int, float] = {}
        self.work_since_s = 0.0

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.inbox: Inbox[ReplicaEvent] = Inbox(4096)
        self.wake, self.done = asyncio.Event(), asyncio.Event()
        self.worker.resync(1, 1)
        self.inbox.put(Synced(self.announce, 1, self.worker.next_seq, self.worker.ack_seq, ()))
        for at_s, record, _ in self.made:
            self.loop.call_at(
                at_s, self.inbox.put, Offered([as_offer(record, record.service_class)])
            )
        clock = Clock(self.loop.time, self.loop.time)  # virtual time itself
        driver = drive(self.core, self.inbox, self.perform, clock, name="live")
        tasks = [asyncio.create_task(driver), asyncio.create_task(self.engine_loop())]
        await self.done.wait()
        for task in tasks:
            task.cancel()

    async def perform(self, action: ReplicaAction) -> None:
        match action:
            case SendPlan(plan):
                self.loop.call_later(self.latency.plan.median_s, self.plan_comes, plan)
            case SendHold(hold):
                self.loop.call_later(self.latency.hold.median_s, self.hold_comes, hold)
            case Answer(key, _, answer):
                self.around.answered(key, isinstance(answer, OfferAccepted))
                self.look()
            case NeedResync(reason):
                raise AssertionError(reason)

    def hold_comes(self, hold: Hold) -> None:
        if not self.worker.held:
            self.work_since_s = self.loop.time()
        answer = self.worker.hold(
            hold,
            self.around.record(hold.key),
            self.around.body(hold.key),
            now_unix_s=self.loop.time(),
        )
        self.loop.call_later(
            self.latency.held.median_s, self.inbox.put, HoldDone(hold.slot, answer)
        )

    def plan_comes(self, plan: BatchPlan) -> None:
        self.plans.append(plan_of(plan, self.loop.time()))
        self.came_s[plan.seq] = self.loop.time()
        assert self.worker.plan(plan) is None
        self.wake.set()

    async def engine_loop(self) -> None:
        last_end_s = 0.0
        while True:
            if (finished := self.worker.between()) is not None:
                self.stored(finished)
            step = self.worker.begin(now_unix_s=self.loop.time())
            if step is None:
                self.wake.clear()
                await self.wake.wait()
                continue
            began_s = self.loop.time()
            ran = run_step(self.engine, self.processor, step)
            if step.plan is None:
                continue
            await asyncio.sleep(ran.exec_s)
            idle_s = 0.0
            if step.work:
                idle_s = max(0.0, self.came_s[step.plan.seq] - max(last_end_s, self.work_since_s))
                last_end_s = self.loop.time()
            self.stored(
                self.worker.finish(
                    ran, started_unix_s=began_s, ended_unix_s=self.loop.time(), idle_s=idle_s
                )
            )

    def stored(self, finished: Finished) -> None:
        self.cached += sum(unpack_list(finished.ack.cached))
        self.loop.call_later(self.latency.ack.median_s, self.inbox.put, Acked(finished.ack))
        for over in finished.overs:
            self.worker.settled(over.key, over.attempt)
            self.around.overs.append((over.key, over.why, over.resume.measure))
        self.look()

    def look(self) -> None:
        if self.around.done:
            self.done.set()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_run_replays_to_the_same_actions(policy: str) -> None:
    latency = Latency.live().at_medians()
    _, _, log = virtual(policy, 0, latency)
    settings = ReplicaSettings(depth=latency.depth, lead_s=latency.lead_s)
    core = ReplicaCore(make(policy), PROFILE, epoch=1, settings=settings, draft=DRAFT)
    core.handle(Synced(ANNOUNCE, 1, 1, 0, ()), now_unix_s=0.0)
    for now_s, event, actions in log:
        assert core.handle(event, now_unix_s=now_s) == actions


@pytest.mark.parametrize("policy", POLICIES)
def test_an_asyncio_loop_and_the_heap_make_the_same_plans_at_the_same_instants(policy: str) -> None:
    latency = Latency.live().at_medians()
    plans, overs, _ = virtual(policy, 0, latency)
    live = LiveLoop(policy, 0, latency)
    run_virtual(live.run())
    assert len(plans) > 50
    assert live.plans[: len(plans)] == plans[: len(live.plans)]
    assert [over for over in live.around.overs if over in overs] == overs


@pytest.mark.parametrize("policy", POLICIES)
def test_both_make_the_same_plans_where_prompts_begin_alike(policy: str) -> None:
    latency = Latency.live().at_medians()
    options = {"announce": replace(ANNOUNCE, kv_blocks=600), "prefixes": True}
    plans, overs, _ = virtual(policy, 0, latency, **options)
    live = LiveLoop(policy, 0, latency, **options)
    run_virtual(live.run())
    assert live.cached > 1000
    assert live.plans[: len(plans)] == plans[: len(live.plans)]
    assert [over for over in live.around.overs if over in overs] == overs
