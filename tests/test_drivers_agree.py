"""Live and virtual drivers decide alike: the same events give the same actions, and two loops around one core give the same plans."""

import asyncio
from array import array
from random import Random

import pytest
from msgspec.structs import replace

from loadgen.mix import PlannedRequest
from shared.columns import unpack_list
from shared.drive.latency import Latency
from shared.drive.timeline import Timeline
from shared.drive.virtual import stored_as
from shared.drive.virtual_loop import run_virtual
from shared.drive.virtual_replica import VirtualReplica
from shared.perf import store
from shared.perf.profile import Profile
from shared.policy import registry
from shared.policy.admission import as_offer
from shared.policy.moves import placed_at
from shared.policy.replica import ReplicaCore, ReplicaSettings
from shared.policy.replica_events import Acked, HoldDone, NeedResync, Offered, ReplicaAction, ReplicaEvent, SendHold, SendPlan, Synced, Tick
from shared.policy.turn import Finished
from shared.policy.worker import WorkerCore
from shared.schemas import Announce, AttemptOver, BatchPlan, Body, Hold, Record
from shared.tiers import DEMO_3
from shared.vocabulary import Measure, ReplicaId, RequestKey, ServiceClass
from tests.virtual_engine import VirtualEngine

ANNOUNCE = Announce(
    replica=ReplicaId("r1"), incarnation="1", at_unix_s=0.0, model="m", engine="virtual", profile="a100-llama3-8b", pool="",
    kv_blocks=1200, block_tokens=16, context_tokens=8192, max_slots=64, epoch=0,
)  # fmt: skip
PROFILE: Profile = store.load("a100-llama3-8b")
POLICIES = registry.names()
Plan = tuple[int, list[int], list[int], float, list[int], float]  # seq, slots, caps, predicted_s, preempted, came at

Over = tuple[RequestKey, str, Measure]
Step = tuple[float, ReplicaEvent, list[ReplicaAction]]


def requests(seed: int) -> list[tuple[float, Record, Body]]:
    rng, at_s, made = Random(seed), 0.0, []
    for number in range(40):
        at_s += rng.expovariate(9.0)
        tier = rng.choice(list(DEMO_3.tiers))
        planned = PlannedRequest(number, at_s, rng.randint(1, 3000), rng.randint(1, 60), tier, rng.choice([1.0, 10.0]), "t", "app")
        record, body = stored_as(planned, DEMO_3, PROFILE, 8192, 1024, at_s)
        body = replace(body, prompt=bytes(4 * planned.prompt_tokens))  # for the real worker
        made.append((at_s, placed_at(record, "test", ANNOUNCE.replica, "1", ServiceClass.STANDARD), body))
    return made


def plan_of(plan: BatchPlan, now_s: float) -> Plan:
    return plan.seq, unpack_list(plan.slots), unpack_list(plan.caps), plan.predicted_s, unpack_list(plan.preempted), now_s


class Around:
    """What a virtual replica asks of a fleet, and what was seen of it."""

    def __init__(self, made: list[tuple[float, Record, Body]]) -> None:
        self.records = {record.key: record for _, record, _ in made}
        self.bodies = {record.key: body for _, record, body in made}
        self.overs: list[Over] = []
        self.times = {record.key: array("d") for _, record, _ in made}

    def record(self, key: RequestKey) -> Record:
        return self.records[key]

    def body(self, key: RequestKey) -> Body:
        return self.bodies[key]

    def token_times(self, key: RequestKey) -> "array[float]":
        return self.times[key]

    def over(self, replica: VirtualReplica, over: AttemptOver) -> None:
        self.overs.append((over.key, over.why, over.resume.measure))


def virtual(policy: str, seed: int, latency: Latency) -> tuple[list[Plan], list[Over], list[Step]]:
    made, line, plans, log = requests(seed), Timeline(), list[Plan](), list[Step]()
    around = Around(made)
    replica = VirtualReplica(ANNOUNCE, registry.make(policy), PROFILE, line, latency, around, hand_back=True)
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
        line.at(at_s, replica.offer, as_offer(record, record.service_class), lambda answer: None)
    while len(around.overs) < len(made):
        line.step()
    return plans, around.overs, log


class LiveLoop:
    """The shells' way: an inbox, a task that feeds the core and sleeps until it wants waking, messages that take time."""

    def __init__(self, policy: str, seed: int, latency: Latency) -> None:
        self.made, self.latency = requests(seed), latency
        self.around = Around(self.made)
        settings = ReplicaSettings(depth=latency.depth, lead_s=latency.lead_s)
        self.core = ReplicaCore(registry.make(policy), PROFILE, epoch=1, settings=settings)
        self.worker = WorkerCore(
            ANNOUNCE.replica, "1", kv_blocks=ANNOUNCE.kv_blocks, block_tokens=16, context_tokens=8192, max_slots=ANNOUNCE.max_slots
        )
        self.engine = VirtualEngine(PROFILE)
        self.plans: list[Plan] = []
        self.came_s: dict[int, float] = {}
        self.work_since_s = 0.0

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.inbox: asyncio.Queue[ReplicaEvent] = asyncio.Queue()
        self.wake, self.done = asyncio.Event(), asyncio.Event()
        self.worker.resync(1, 1)
        self.inbox.put_nowait(Synced(ANNOUNCE, 1, self.worker.next_seq, self.worker.ack_seq, ()))
        for at_s, record, _ in self.made:
            self.loop.call_at(at_s, self.inbox.put_nowait, Offered([as_offer(record, record.service_class)]))
        tasks = [asyncio.create_task(self.drive()), asyncio.create_task(self.engine_loop())]
        await self.done.wait()
        for task in tasks:
            task.cancel()

    async def drive(self) -> None:
        while True:
            wake_s, event = self.core.wake_at_unix_s(), None
            try:
                async with asyncio.timeout_at(wake_s):
                    event = await self.inbox.get()
            except TimeoutError:
                event = Tick()
            for action in self.core.handle(event, now_unix_s=self.loop.time()):
                match action:
                    case SendPlan(plan):
                        self.loop.call_later(self.latency.plan_s, self.plan_comes, plan)
                    case SendHold(hold):
                        self.loop.call_later(self.latency.hold_s, self.hold_comes, hold)
                    case NeedResync(reason):
                        raise AssertionError(reason)

    def hold_comes(self, hold: Hold) -> None:
        if not self.worker.held:
            self.work_since_s = self.loop.time()
        answer = self.worker.hold(hold, self.around.record(hold.key), self.around.body(hold.key))
        self.loop.call_later(self.latency.held_s, self.inbox.put_nowait, HoldDone(hold.slot, answer.held, answer.reason, answer.in_doubt))

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
            turn = self.worker.begin()
            if turn is None:
                self.wake.clear()
                await self.wake.wait()
                continue
            began_s = self.loop.time()
            done, exec_s = self.engine.run(turn)
            if turn.plan is None:
                continue
            await asyncio.sleep(exec_s)
            idle_s = 0.0
            if turn.work:
                idle_s = max(0.0, self.came_s[turn.plan.seq] - max(last_end_s, self.work_since_s))
                last_end_s = self.loop.time()
            self.stored(self.worker.finish(done, started_unix_s=began_s, ended_unix_s=self.loop.time(), exec_s=exec_s, idle_s=idle_s))

    def stored(self, finished: Finished) -> None:
        self.loop.call_later(self.latency.ack_s, self.inbox.put_nowait, Acked(finished.ack))
        for over in finished.overs:
            self.worker.settled(over.key, over.attempt)
            self.around.overs.append((over.key, over.why, over.resume.measure))
        if len(self.around.overs) == len(self.made):
            self.done.set()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_run_replays_to_the_same_actions(policy: str, seed: int) -> None:
    latency = Latency.live()
    _, _, log = virtual(policy, seed, latency)
    settings = ReplicaSettings(depth=latency.depth, lead_s=latency.lead_s)
    core = ReplicaCore(registry.make(policy), PROFILE, epoch=1, settings=settings)
    core.handle(Synced(ANNOUNCE, 1, 1, 0, ()), now_unix_s=0.0)
    for now_s, event, actions in log:
        assert core.handle(event, now_unix_s=now_s) == actions


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_an_asyncio_loop_and_the_heap_make_the_same_plans_at_the_same_instants(policy: str, seed: int) -> None:
    latency = Latency.live()
    plans, overs, _ = virtual(policy, seed, latency)
    live = LiveLoop(policy, seed, latency)
    run_virtual(live.run())
    assert len(plans) > 50
    assert live.plans[: len(plans)] == plans[: len(live.plans)]
    assert [over for over in live.around.overs if over in overs] == overs
