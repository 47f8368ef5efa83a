"""Joins ReplicaCore and WorkerCore by unreliable messages in virtual time, for tests; the sim
engine is the GPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from loadgen.simulator.timeline import Alarm, Timeline
from services.worker.core.worker import WorkerCore
from services.worker.engine import EngineFacts, EngineState, Outcome
from services.worker.engines.sim.engine import SimEngine
from shared.columns import pack, unpack_list
from shared.core.replica.events import (
    Acked,
    Answer,
    HoldDone,
    NeedResync,
    Refused,
    ReplicaEvent,
    ReplicaSettings,
    SendHold,
    SendPlan,
    Synced,
)
from shared.core.replica.replica import ReplicaCore
from shared.core.tick import Tick
from shared.core.worker.step import Finished, Load, Ran, Step, TurnDone, Work
from shared.perf.draft import Draft
from shared.policy import registry
from shared.policy.seam import Policy, View
from shared.prefix import Changes, Where, hashes_of, pack_hashes
from shared.schemas import (
    AttemptOver,
    BatchPlan,
    Body,
    Delta,
    Hold,
    HoldAnswer,
    OfferAnswer,
    OfferInDoubt,
    PlanAck,
    Record,
)
from shared.vocabulary import ReplicaId, RequestKey, Slot
from tests import made
from tests.services.worker.engines.sharing_engine import SharingEngine
from tests.services.worker.wayward import WaywardEngine
from tests.shared.core.chaos_policy import Chaos, Watched
from tests.shared.policy.views import Linear

REPLICA = ReplicaId("r1")


@dataclass(frozen=True, kw_only=True)
class World:
    """The policy, the sizes and the faults of one run."""

    policy: str
    depth: int
    kv_blocks: int
    block_tokens: int
    slots: int
    delay_s: float  # of a message, at most
    noise: float  # of an iteration's duration
    seed: int
    hand_back: bool = True
    hits: float = 0.0  # how often the engine finds a part of what begins in a prefix cache
    lapses: float = 0.0  # how often it does nothing for an entry
    draft_kv_blocks: int = 0  # 0: no limit
    # requests share the KV of their common beginnings: what others hold ("held"), or have left, too
    # ("left"); empty: they do not
    sharing: str = ""
    # the worker says of prompts that it keeps them, or no longer does, whatever the engine finds
    rumours: bool = False
    settings: dict[str, str] = field(default_factory=dict)


class Shells(ABC):
    """The services around the two cores, and the messages between them."""

    def __init__(self, world: World) -> None:
        self.world, self.rng, self.line = world, Random(world.seed), Timeline()
        self.plans, self.resyncs = 0, 0
        sizes: dict[str, Any] = {
            "kv_blocks": world.kv_blocks,
            "block_tokens": world.block_tokens,
            "context_tokens": world.kv_blocks * world.block_tokens,
            "max_slots": world.slots,
        }
        drafts = world.draft_kv_blocks
        self.announce = made.announce(profile="p", draft_kv_blocks=drafts, **sizes)
        self.engine = self._engine(
            made.engine_facts(draft=1.0 if drafts else 0.0, draft_kv_blocks=drafts, **sizes)
        )
        self.worker = WorkerCore(REPLICA, self.announce.incarnation, **sizes)
        self.epoch = 0
        self.sync = 0
        self.records: dict[RequestKey, Record] = {}
        self.bodies: dict[RequestKey, Body] = {}
        self.in_flight = 0  # messages between planner and worker
        self.losing: list[str] = []
        self.last_s = {"plan": 0.0, "ack": 0.0, "offer": 0.0}
        self.answers: dict[tuple[RequestKey, int], int] = {}
        self.resync_waits: list[tuple[ReplicaCore, int, int]] = []
        self.resyncing = False
        self.drafted = 0
        self.blind = False  # an ack was lost: the planner cannot know yet

    def _engine(self, facts: EngineFacts) -> SimEngine:
        world, fixed = self.world, {"wait": None, "clock": lambda: 0.0}
        if world.sharing:
            return SharingEngine(facts, Linear(), idle=world.sharing == "left", **fixed)
        odd = {"rng": Random(world.seed), "hits": world.hits, "lapses": world.lapses}
        return WaywardEngine(facts, Linear(), **fixed, **odd)

    @abstractmethod
    def look(self, view: View) -> None: ...

    @abstractmethod
    def answered(self, key: RequestKey, attempt: int, answer: OfferAnswer) -> None: ...

    @abstractmethod
    def in_doubt(self, key: RequestKey, attempt: int) -> None: ...

    @abstractmethod
    def receive(self, key: RequestKey, delta: Delta) -> None: ...

    @abstractmethod
    def over(self, over: AttemptOver) -> None: ...

    # ------------------------------------------------------------ messages

    def after(self, call: Callable[..., None], *args: Any) -> None:
        self.line.after(self.rng.random() * self.world.delay_s, call, *args)

    def ordered(self, channel: str, call: Callable[..., None], *args: Any) -> None:
        at_s = max(self.last_s[channel], self.line.now_s + self.rng.random() * self.world.delay_s)
        self.last_s[channel] = at_s
        self.in_flight += 1
        self.line.at(at_s, self.arrived, call, *args)

    def arrived(self, call: Callable[..., None], *args: Any) -> None:
        self.in_flight -= 1
        call(*args)

    def lost(self, what: str) -> bool:
        if what in self.losing:
            self.losing.remove(what)
            return True
        return False

    # ------------------------------------------------------------ the planner's shell

    def take_over(self) -> None:
        """A planner with a higher epoch; requests that waited for the old one are offered again."""
        self.epoch += 1
        world = self.world
        inner: Policy = (
            Chaos(self.rng)
            if world.policy == "chaos"
            else registry.make(world.policy, world.settings)
        )
        settings = ReplicaSettings(depth=world.depth, hand_back=world.hand_back, overdue_s=0.5)
        self.core = ReplicaCore(
            Watched(inner, self.look),
            Linear(),
            epoch=self.epoch,
            settings=settings,
            draft=Draft(Linear(), 1.0, 1.0),
        )
        self.alarm = Alarm(
            self.line, self.core.wake_at_unix_s, lambda core=self.core: self.feed(core, Tick())
        )
        self.sync = 0
        self.resyncing = False
        lost, self.answers = list(self.answers), {}
        for key, attempt in lost:
            self.after(self.in_doubt, key, attempt)
        self.resync()

    def feed(self, core: ReplicaCore, event: ReplicaEvent) -> None:
        if core is not self.core:
            return
        for action in core.handle(event, now_unix_s=self.line.now_s):
            match action:
                case SendPlan(plan):
                    self.plans += 1
                    slots = unpack_list(plan.slots)
                    assert len(slots) == len(set(slots)), "a request twice in a plan"
                    assert all(cap > 0 for cap in unpack_list(plan.caps))
                    if not self.lost("lose_plan"):
                        self.ordered("plan", self.plan_comes, core, plan)
                case SendHold(hold):
                    if not self.lost("lose_hold"):
                        self.in_flight += 1
                        self.after(self.arrived, self.hold_comes, core, hold)
                    else:
                        self.line.after(
                            0.2,
                            self.feed,
                            core,
                            HoldDone(hold.slot, OfferInDoubt(reason="timeout")),
                        )
                case Answer(key, attempt, answer):
                    for _ in range(self.answers.pop((key, attempt), 0)):
                        self.after(self.answered, key, attempt, answer)
                        break
                case NeedResync(_):
                    self.resync()
        if core.synced:
            core.check()
        self.alarm.reset()

    def resync(self) -> None:
        if self.resyncing:
            return
        self.resyncing = True
        self.sync += 1
        self.resyncs += 1
        self.after(self.resync_comes, self.core, self.epoch, self.sync)

    def synced(self, core: ReplicaCore, event: Synced) -> None:
        if core is self.core:
            self.resyncing = self.blind = False
            self.feed(core, event)

    # ------------------------------------------------------------ the worker's shell

    def resync_comes(self, core: ReplicaCore, epoch: int, sync: int) -> None:
        if self.worker.resync(epoch, sync):
            self.resync_waits.append((core, epoch, sync))
            if not self.worker.running:
                self.answer_resyncs()

    def answer_resyncs(self) -> None:
        waits, self.resync_waits = self.resync_waits, []
        worker = self.worker
        for core, _, sync in waits:
            event = Synced(
                replace(self.announce, epoch=worker.epoch),
                sync,
                worker.next_seq,
                worker.ack_seq,
                worker.entries(),
                worker.shared_blocks,
                worker.draft_shared_blocks,
                pack_hashes(worker.prefixes.kept),
                pack_hashes(worker.prefixes.moved),
            )
            self.after(self.synced, core, event)

    def hold_comes(self, core: ReplicaCore, hold: Hold) -> None:
        record = self.records[hold.key]
        answer: HoldAnswer = self.worker.hold(
            hold, record, self.bodies[hold.key], now_unix_s=self.line.now_s
        )
        self.worker.check()
        self.after(self.feed, core, HoldDone(hold.slot, answer))

    def plan_comes(self, core: ReplicaCore, plan: BatchPlan) -> None:
        refused = self.worker.plan(plan)
        if refused is not None and refused.epoch == self.epoch:
            self.after(self.feed, core, Refused(refused.reason))
        self.go_on()

    def go_on(self) -> None:
        while not self.worker.running:
            if (finished := self.worker.between()) is not None:
                self.stored(finished)
            self.answer_resyncs()
            turn = self.worker.begin(now_unix_s=self.line.now_s)
            if turn is None:
                return
            done, ran = self.run(turn)
            if turn.plan is not None:
                self.line.after(
                    ran.exec_s * (1 + self.world.noise * self.rng.random()),
                    self.end,
                    turn,
                    done,
                    self.line.now_s,
                    ran.drafted_s,
                    self.engine.snapshot(),
                )

    def run(self, turn: Step) -> tuple[list[TurnDone], Outcome]:
        for slot in turn.preempts:
            self.engine.preempt(Slot(slot))
        for slot in turn.releases:
            self.engine.release(Slot(slot))
        shared, said = self.engine.snapshot(), self.worker
        assert said.shared_blocks <= shared.shared_blocks, "less is shared than was said"
        assert said.draft_shared_blocks <= shared.draft_shared_blocks, "the draft's is not shared"
        for load in turn.loads:
            self.engine.load(
                Load(Slot(load.slot), load.tokens, load.generated, load.sampling, load.seed)
            )
        if not turn.work:
            return [], Outcome([], 0.0)
        outcome = self.engine.execute(
            [Work(Slot(w.slot), w.tokens, w.emits) for w in turn.work], turn.selection
        )
        done = []
        for work, did in zip(turn.work, outcome.done, strict=True):
            kept = list(did.tokens[: work.limit])
            finish = work.limit_reason if kept and len(kept) == work.limit else None
            done.append(TurnDone(did.computed, kept, "", finish, did.drafted, cached=did.cached))
            self.drafted += did.drafted
        return done, outcome

    def end(
        self, turn: Step, done: list[TurnDone], began_s: float, drafted_s: float, state: EngineState
    ) -> None:
        now_s = self.line.now_s
        changes = Changes()
        for where in Where:
            for each in self.rumour():
                changes.note(each, where)
        self.stored(
            self.worker.finish(
                Ran(
                    done,
                    now_s - began_s,
                    drafted_s=drafted_s,
                    shared_blocks=state.shared_blocks,
                    draft_shared_blocks=state.draft_shared_blocks,
                    prefixes=changes.take(),
                ),
                started_unix_s=began_s,
                ended_unix_s=now_s,
                idle_s=0.0,
            )
        )
        self.go_on()

    def rumour(self) -> list[int]:
        """Some of the prefixes of the requests."""
        if not self.world.rumours or self.rng.random() < 0.5:
            return []
        every = [hashes_of(record.prefix)[0] for record in self.records.values()]
        return self.rng.sample(every, self.rng.randrange(len(every) + 1))

    def stored(self, finished: Finished) -> None:
        for out in finished.outgoing:
            if isinstance(out.event, Delta):
                self.receive(RequestKey(out.subject), out.event)
        self.worker.check()
        for over in finished.overs:
            self.after(self.over, over)
        if self.lost("lose_ack"):
            self.blind = True
        else:
            self.ordered("ack", self.feed, self.core, Acked(self.falsified(finished.ack)))

    def falsified(self, ack: PlanAck) -> PlanAck:
        """The ack, or what no worker can have done."""
        if not ack.slots or not self.lost("false_ack"):
            return ack
        computed, emitted = unpack_list(ack.computed), unpack_list(ack.emitted)
        most = pack([n + 100_000 for n in computed])
        return self.rng.choice(
            (
                replace(ack, computed=most),
                replace(ack, computed=most, cached=pack([100_000] * len(computed))),
                replace(ack, emitted=pack([n + 100 for n in emitted])),
                replace(ack, computed=pack([-1 - n for n in computed])),
                replace(ack, cached=pack([-1 for _ in computed])),
            )
        )
