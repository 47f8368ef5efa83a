"""ReplicaCore and WorkerCore joined by unreliable messages in virtual time, with the sim engine's
books as the GPU.

The bench stands for everything around the two: it offers, withdraws, cancels, settles, and offers
again what came back. After every event it checks all books; at the end, that every request ended
once with just the tokens it should have.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from loadgen.simulator.timeline import Alarm, Timeline
from services.worker.core.worker import WorkerCore
from services.worker.engine import EngineFacts, EngineState, Outcome
from services.worker.engines.sim.engine import SimEngine, readable_token
from shared.columns import pack, unpack_list
from shared.core.offer import as_offer
from shared.core.record import record as life
from shared.core.record.record import FINAL
from shared.core.record.states import State, state_of
from shared.core.record.verdict import ended
from shared.core.replica.events import (
    Acked,
    Answer,
    HoldDone,
    NeedResync,
    Offered,
    Refused,
    ReplicaEvent,
    SendHold,
    SendPlan,
    Synced,
)
from shared.core.replica.replica import ReplicaCore, ReplicaSettings
from shared.core.tick import Tick
from shared.core.worker.step import Finished, Load, Step, TurnDone, Work
from shared.perf.draft import Draft
from shared.policy import registry
from shared.policy.seam import (
    Admission,
    Choice,
    Declared,
    Observation,
    Phase,
    Policy,
    Speculation,
    View,
)
from shared.schemas import (
    Announce,
    AttemptOver,
    BatchPlan,
    Body,
    Delta,
    Hold,
    HoldAnswer,
    Offer,
    OfferAccepted,
    OfferAnswer,
    OfferInDoubt,
    PlanAck,
    Record,
    Sampling,
)
from shared.vocabulary import (
    FinishReason,
    RecordState,
    ReplicaId,
    RequestKey,
    ServiceClass,
    Slo,
    Slot,
)
from tests.services.worker.engines.sharing_engine import SharingEngine
from tests.services.worker.wayward import WaywardEngine
from tests.shared.policy.views import Linear

REPLICA = ReplicaId("r1")
HOPS = 16  # a request that so many attempts did not place is relegated
STEPS = 40_000  # of one run: far more than any schedule here needs


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of a schedule, `after_s` after the one before it."""

    after_s: float
    prompt: int
    max_tokens: int
    output: int
    slo: Slo
    importance: float = 1.0
    expires_s: float = 1e6
    wait_s: float = 1e6  # for its first token, as a best-effort request
    best_effort: bool = False
    thinking: int | None = None  # tokens of the output


@dataclass(frozen=True, kw_only=True)
class Act:
    """Something that happens at an instant: `what` to request `who` (modulo their number)."""

    at_s: float
    # cancel, withdraw, drain, resync, takeover, false_ack, lose_ack, lose_plan, lose_hold
    what: str
    who: int = 0


@dataclass(frozen=True, kw_only=True)
class World:
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
    settings: dict[str, str] = field(default_factory=dict)


class Chaos:
    """Does everything a policy may do, at random, for a while; then serves in turn so that all
    ends.
    """

    name = "chaos"
    declared = Declared(drops=True)

    def __init__(self, rng: Random, calls: int = 60) -> None:
        self._rng, self._calls = rng, calls
        self._plain = registry.make("fcfs", {"chunk_tokens": "24"})

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        self._calls -= 1
        return [
            Admission(self._calls < 0 or self._rng.random() < 0.8, reason="chance") for _ in offers
        ]

    def plan(self, view: View) -> Sequence[Choice]:
        self._calls -= 1
        first = self._choice(view, 0)
        if self._calls < 0 or not (len(first.slots) or first.preempt or first.release):
            # a policy that chooses nothing is not asked again until something happens
            return self._plain.plan(view)
        if self._rng.random() < 0.5:
            first = self._speculating(first, view)
        later = [self._choice(view, n + 1) for n in range(self._rng.choice((0, 0, 0, 1, 3)))]
        return [first, *(choice for choice in later if len(choice.slots))]

    def _choice(self, view: View, ahead: int) -> Choice:
        """Iteration `ahead` from now on: of what may have become of a request by then, only what is
        certain to exist.
        """
        rng = self._rng
        rows = list(range(view.rows))
        rng.shuffle(rows)
        slots, caps = [], []
        for row in rows[: rng.randint(0, len(rows))]:
            if view.generated_tokens[row] + ahead >= view.max_tokens[row]:
                continue
            slots.append(int(view.slot[row]))
            caps.append(1 if ahead or view.phase[row] == Phase.DECODE else rng.randint(1, 40))

        def some(p: float) -> list[int]:
            return [] if ahead else [int(s) for s in view.slot if rng.random() < p]

        preempt = [s for s in some(0.04) if s not in slots]
        release = [(s, rng.choice(("offloaded", "dropped"))) for s in some(0.02)]
        named = {s for s, _ in release}
        return Choice(
            slots=np.array(slots, dtype=np.int32),
            caps=np.array(caps, dtype=np.int32),
            preempt=[s for s in preempt if s not in named],
            relegate=[s for s in some(0.04) if s not in named and s not in preempt],
            promote=(),
            release=release,
        )

    def _speculating(self, choice: Choice, view: View) -> Choice:
        """Some decodes draft, with more or less of a cap than their depth could fill."""
        decoding = {
            int(slot)
            for slot, phase in zip(view.slot, view.phase, strict=True)
            if phase == Phase.DECODE
        }
        chance = [
            self._rng.randint(1, 4) if int(slot) in decoding and self._rng.random() < 0.7 else 0
            for slot in choice.slots
        ]
        depth = np.array(chance, dtype=np.int32)
        caps = np.where(
            depth > 0,
            np.array([self._rng.randint(1, 6) for _ in chance], dtype=np.int32),
            choice.caps,
        ).astype(np.int32)
        zeros = np.zeros(len(depth), dtype=np.int32)
        drafts = Speculation(
            "chain",
            depth,
            zeros + 1,
            budget_tokens=1 << 20,
            needed_limit_tokens=1 << 20,
        )
        return dataclasses.replace(choice, caps=caps, speculation=drafts)

    def observe(self, seen: Observation) -> None:
        self._plain.observe(seen)


class Watched:
    """Any policy; looks at each view it is shown before it decides."""

    def __init__(self, inner: Policy, look: Callable[[View], None]) -> None:
        self._inner, self._look = inner, look
        self.name, self.declared = inner.name, inner.declared

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return self._inner.admit(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        self._look(view)
        return self._inner.plan(view)

    def observe(self, seen: Observation) -> None:
        self._inner.observe(seen)


@dataclass
class Client:
    """The output that one client has received."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    ends: list[str] = field(default_factory=list)
    # seconds beyond its wait at which a best-effort request had its first token, or its end
    beyond_s: float = 0.0


class Bench:
    def __init__(self, world: World, asks: Sequence[Ask], acts: Sequence[Act]) -> None:
        self.world, self.rng, self.line = world, Random(world.seed), Timeline()
        self.acts, self.plans, self.resyncs = acts, 0, 0
        context = world.kv_blocks * world.block_tokens
        self.announce = Announce(
            replica=REPLICA, incarnation="i1", at_unix_s=0.0, model="m", engine="sim", profile="p",
            pool="", kv_blocks=world.kv_blocks,
            block_tokens=world.block_tokens, context_tokens=context, max_slots=world.slots, epoch=0,
            draft_kv_blocks=world.draft_kv_blocks,
        )  # fmt: skip
        facts = EngineFacts(
            "sim",
            "m",
            "p",
            world.kv_blocks,
            world.block_tokens,
            context,
            world.slots,
            256,
            frozenset(),
            draft=1.0 if world.draft_kv_blocks else 0.0,
            draft_kv_blocks=world.draft_kv_blocks,
        )
        self.engine: SimEngine = (
            SharingEngine(
                facts, Linear(), wait=None, clock=lambda: 0.0, idle=world.sharing == "left"
            )
            if world.sharing
            else WaywardEngine(
                facts,
                Linear(),
                wait=None,
                clock=lambda: 0.0,
                rng=Random(world.seed),
                hits=world.hits,
                lapses=world.lapses,
            )
        )
        self.worker = WorkerCore(
            REPLICA,
            "i1",
            kv_blocks=world.kv_blocks,
            block_tokens=world.block_tokens,
            context_tokens=context,
            max_slots=world.slots,
        )
        self.epoch = 0
        self.sync = 0
        self.records: dict[RequestKey, Record] = {}
        self.bodies: dict[RequestKey, Body] = {}
        self.clients: dict[RequestKey, Client] = {}
        self.names: list[RequestKey] = []
        self.in_flight = 0  # messages between planner and worker
        self.losing: list[str] = []
        self.last_s = {"plan": 0.0, "ack": 0.0, "offer": 0.0}
        self.answers: dict[tuple[RequestKey, int], int] = {}
        self.withdrawn: set[tuple[RequestKey, int]] = set()
        self.resync_waits: list[tuple[ReplicaCore, int, int]] = []
        self.resyncing = False
        self.compared = self.drafted = 0
        self.watch: Callable[[View], object] = lambda view: None
        self.blind = False  # an ack was lost: the planner cannot know yet
        self.take_over()
        at_s = 0.0
        for number, ask in enumerate(asks):
            at_s += ask.after_s
            self.line.at(at_s, self.arrive, number, ask)
        self.to_come = len(asks)
        for act in acts:
            self.line.at(act.at_s, self.act, act)

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
        self,
        turn: Step,
        done: list[TurnDone],
        began_s: float,
        drafted_s: float,
        state: EngineState,
    ) -> None:
        now_s = self.line.now_s
        self.stored(
            self.worker.finish(
                done,
                started_unix_s=began_s,
                ended_unix_s=now_s,
                exec_s=now_s - began_s,
                idle_s=0.0,
                drafted_s=drafted_s,
                shared_blocks=state.shared_blocks,
                draft_shared_blocks=state.draft_shared_blocks,
            )
        )
        self.go_on()

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

    # ------------------------------------------------------------ admission and the clients

    def arrive(self, number: int, ask: Ask) -> None:
        self.to_come -= 1
        key, now_s = RequestKey(f"t.{number}"), self.line.now_s
        self.names.append(key)
        self.clients[key] = Client(ask)
        self.records[key] = Record(
            key=key, body_key="", owner="bench",
            state=RecordState.RELEGATED if ask.best_effort else RecordState.ACTIVE, attempt=0,
            service_class=ServiceClass.BEST_EFFORT if ask.best_effort else ServiceClass.STANDARD,
            tier="tier", slo=ask.slo, begin_by_unix_s=now_s + ask.wait_s,
            importance=ask.importance, application="app", session="", arrived_unix_s=now_s,
            expires_unix_s=now_s + ask.expires_s,
            prompt_tokens=ask.prompt, max_tokens=ask.max_tokens, stream_subject=key,
        )  # fmt: skip
        sampling = Sampling(
            max_tokens=ask.max_tokens,
            output_tokens=ask.output,
            thinking_tokens=ask.thinking,
            ignore_eos=True,
            seed=number,
        )
        self.bodies[key] = Body(prompt=pack([1] * ask.prompt), sampling=sampling)
        self.place(key)

    def place(self, key: RequestKey) -> None:
        record = self.records[key]
        if state_of(record) in (State.PLACED, State.CANCELLED_PLACED, State.ENDED):
            return
        if record.cancelled:
            self.finish(key, FinishReason.CANCELLED)
        elif self.leaves_unix_s(record) <= self.line.now_s:
            self.finish(key, FinishReason.EXPIRED)
        else:
            pooled = state_of(record) is State.RELEGATED
            at = (
                life.drawn(record, "bench", REPLICA, "i1", record.service_class)
                if pooled
                else life.placed(record, "bench", REPLICA, "i1", attempt=record.attempt)
            )
            assert at is not None
            self.records[key] = at
            self.offer(key, at.attempt)

    def leaves_unix_s(self, record: Record) -> float:
        """As relegation has it, or else admission."""
        pooled = state_of(record) is State.RELEGATED
        return record.leaves_pool_unix_s if pooled else record.expires_unix_s

    def offer(self, key: RequestKey, attempt: int) -> None:
        self.answers[key, attempt] = 1
        self.ordered(
            "offer", self.feed_offer, as_offer(self.records[key], self.records[key].service_class)
        )

    def feed_offer(self, offer: Offer) -> None:
        if (offer.key, offer.attempt) in self.answers:
            self.feed(self.core, Offered([offer]))

    def answered(self, key: RequestKey, attempt: int, answer: OfferAnswer) -> None:
        if self.records[key].attempt != attempt or isinstance(answer, OfferAccepted):
            return
        if isinstance(answer, OfferInDoubt):
            self.in_doubt(key, attempt)
        else:
            self.back(key, attempt)

    def in_doubt(self, key: RequestKey, attempt: int) -> None:
        if self.records[key].attempt == attempt and self.records[key].verdict is None:
            self.withdraw(key, attempt)

    def withdraw(self, key: RequestKey, attempt: int) -> None:
        over = self.worker.withdraw(key, attempt)
        self.worker.check()
        if over is False:
            self.back(key, attempt)
        elif over is not True:
            self.over(over)
        self.go_on()

    def back(self, key: RequestKey, attempt: int) -> None:
        """Offers the attempt again a little later: it is not held, for certain."""
        record = self.records[key]
        if record.replica is None or record.verdict is not None or record.attempt != attempt:
            return
        asked = record.attempt >= HOPS and not record.cancelled
        if asked and state_of(record) is State.PLACED:
            after = life.relegated(record, "bench")  # as admission does where nobody takes it
        else:
            after = life.moved(record, record, "bench", self.line.now_s)
        assert after is not None
        self.records[key] = after
        if after.verdict is not None:
            self.clients[key].ends.append(after.verdict.finish_reason)
        else:
            self.line.after(0.05, self.place, key)

    def over(self, over: AttemptOver) -> None:
        """An end comes again until it is settled: the second report finds the record moved on."""
        record = self.records[over.key]
        after = life.settled(record, over, "bench", self.line.now_s)
        if after is not None:
            assert unpack_list(over.resume.tokens) == self.clients[over.key].tokens
            self.records[over.key] = after
            if after.verdict is not None:
                self.clients[over.key].ends.append(after.verdict.finish_reason)
            else:
                assert over.why not in FINAL
                self.line.after(0.05, self.place, over.key)
        self.worker.settled(over.key, over.attempt)

    def finish(self, key: RequestKey, reason: FinishReason) -> None:
        record = self.records[key]
        self.records[key] = ended(record, reason, record.resume, self.line.now_s)
        self.clients[key].ends.append(reason)

    def receive(self, key: RequestKey, delta: Delta) -> None:
        client = self.clients[key]
        assert not client.ends, "tokens after the end"
        assert delta.attempt >= client.attempt, "tokens of an attempt that was over"
        assert delta.attempt == self.records[key].attempt
        assert delta.offset == len(client.tokens), "a gap or a doubling"
        client.attempt = delta.attempt
        if not client.tokens:
            self.begins(key)
        client.tokens += delta.tokens

    def begins(self, key: RequestKey) -> None:
        """The first token of a request comes."""
        offers = [entry.offer for entry in self.worker.entries() if entry.offer.key == key]
        if any(offer.service_class is ServiceClass.BEST_EFFORT for offer in offers):
            by_s = self.records[key].begin_by_unix_s
            self.clients[key].beyond_s = max(0.0, self.line.now_s - by_s)

    # ------------------------------------------------------------ what happens to them

    def act(self, act: Act) -> None:
        key = self.names[act.who % len(self.names)] if self.names else None
        match act.what:
            case "cancel" if key is not None and self.records[key].verdict is None:
                self.records[key] = life.cancelled(self.records[key]) or self.records[key]
                self.worker.cancel(key, "because")
                self.go_on()
            case "withdraw" if (
                key is not None
                and self.records[key].replica is not None
                and self.records[key].verdict is None
            ):
                self.withdraw(key, self.records[key].attempt)
            case "lose_ack" | "lose_plan" | "lose_hold" | "false_ack":
                self.losing.append(act.what)
            case "resync":
                self.feed(self.core, Refused("the bench says so"))
            case "takeover":
                self.take_over()
            case "drain":
                self.worker.drain()
                self.go_on()
            case _:
                pass

    # ------------------------------------------------------------ looking

    def look(self, view: View) -> None:
        """Check what holds for every view; while nothing moves, it shows the worker's state."""
        self.watch(view)
        assert view.kv_free_blocks >= 0
        decode = view.phase == Phase.DECODE
        assert (view.computed_tokens[view.phase == Phase.WAITING] == 0).all()
        assert (view.computed_tokens[~decode] < view.target_tokens[~decode]).all(), (
            "a prefill without anything left"
        )
        assert (view.generated_tokens[decode] > 0).all()
        made = view.generated_tokens > 0
        assert (np.isfinite(view.newest_token_unix_s) == made).all(), "a token without an instant"
        assert (view.newest_token_unix_s[made] <= view.start_unix_s + 1e-9).all(), "a token to come"
        quiet = not (
            self.in_flight
            or self.blind
            or self.worker.running
            or self.worker.waiting_plans
            or self.worker.closing
        )
        # after a resync the picture may be old until a plan shows it
        if quiet and self.world.depth == 1 and self.resyncs == 1:
            self.compared += 1
            entries = {e.slot: e for e in self.worker.entries()}
            for i, slot in enumerate(view.slot.tolist()):
                seen, offer = (
                    (view.computed_tokens[i], view.generated_tokens[i]),
                    entries[slot].offer,
                )
                assert seen == (entries[slot].computed_tokens, entries[slot].generated_tokens)
                paces_s = (
                    offer.slo.pace_s(offer.thinking),
                    offer.slo.tightest_pace_s(offer.thinking),
                )
                assert (view.thinking[i], view.tbt_s[i], view.tightest_tbt_s[i]) == (
                    offer.thinking,
                    *paces_s,
                ), "another stage"
                due_s = offer.next_due_unix_s
                assert (
                    view.next_due_unix_s[i] == due_s or abs(view.next_due_unix_s[i] - due_s) < 1e-6
                ), "another deadline"
                assert view.newest_token_unix_s[i] == offer.newest_token_unix_s, "another token"

    def run_all(self) -> None:
        """Runs until every request has ended. Raises AssertionError if one does not."""
        steps = 0
        while self.to_come or any(not c.ends for c in self.clients.values()):
            steps += 1
            assert self.line.next_s < float("inf"), f"stalled: {self.story()}"
            assert steps < STEPS, f"no end in sight: {self.story()}"
            self.line.step()
        for number, (key, client) in enumerate(self.clients.items()):
            ask = client.ask
            assert len(client.ends) == 1, f"{key} ended {client.ends}"
            assert client.tokens == [
                readable_token(number, n) for n in range(len(client.tokens))
            ], f"{key}: other tokens"
            whole = min(ask.output, ask.max_tokens)
            assert len(client.tokens) <= whole
            self.check_stages(key, ask, len(client.tokens))
            if client.ends[0] in (FinishReason.STOP, FinishReason.LENGTH):
                assert len(client.tokens) == whole
                assert client.ends[0] == (
                    FinishReason.STOP if ask.output <= ask.max_tokens else FinishReason.LENGTH
                )

    def check_stages(self, key: RequestKey, ask: Ask, made: int) -> None:
        """The measure, whatever moved the request, knows when its thinking ended, and has the
        deadlines of its stages.
        """
        measure, slo = self.records[key].resume.measure, ask.slo
        if not made or not slo.thinks:
            return
        wanted = ask.thinking or 0  # this model has no token that ends it
        assert measure.thinking_tokens == (wanted if made >= wanted else None), (
            f"{key}: thought for {measure.thinking_tokens}"
        )
        anchor_s = (
            self.records[key].arrived_unix_s + slo.ttft_s
            if slo.ttft_s is not None
            else measure.first_unix_s
        )
        thinking = max(0, min(made, wanted - 1))  # steps to a token that is thinking
        response = made - thinking
        due_s = (
            anchor_s
            + thinking * slo.pace_s(True)
            + (response * slo.pace_s(False) if response else 0.0)
        )
        assert measure.next_due_unix_s == due_s or abs(measure.next_due_unix_s - due_s) < 1e-6, (
            f"{key}: another deadline"
        )

    def story(self) -> str:
        open_ = {
            k: (r.state, r.attempt, r.service_class.value)
            for k, r in self.records.items()
            if r.verdict is None
        }
        return (
            f"at {self.line.now_s:.3f} s: {open_}; held {self.worker.entries()}; "
            f"synced {self.core.synced}; plans {self.plans}"
        )
