"""One replica in virtual time: the planner's core and the worker's core, joined as their live shells join them."""

from array import array
from collections.abc import Callable
from typing import Protocol

from shared.drive.latency import Latency
from shared.drive.timeline import Alarm, Timeline
from shared.drive.virtual_engine import VirtualEngine
from shared.perf.profile import Profile
from shared.policy.replica import ReplicaCore, ReplicaSettings
from shared.policy.replica_events import (
    Acked,
    Answer,
    HoldDone,
    NeedResync,
    Offered,
    ReplicaEvent,
    SendHold,
    SendPlan,
    Synced,
    Tick,
)
from shared.policy.seam import Policy
from shared.policy.turn import Finished, Turn, TurnDone
from shared.policy.worker import WorkerCore
from shared.schemas import Announce, AttemptOver, BatchPlan, Body, Digest, Hold, Offer, OfferAnswer, PlanAck, Record
from shared.vocabulary import ReplicaId, RequestKey

Reply = Callable[[OfferAnswer], None]


class Store(Protocol):
    """What a replica asks of the rest of the fleet."""

    def record(self, key: RequestKey) -> Record: ...

    def body(self, key: RequestKey) -> Body: ...

    def token_times(self, key: RequestKey) -> "array[float] | None":
        """Where the instants of this request's tokens are kept, if they are."""

    def over(self, replica: "VirtualReplica", over: AttemptOver) -> None:
        """An attempt is over; its ack is stored."""


class VirtualReplica:
    """Nothing is lost here, so a resync or a refused plan is a bug of the cores."""

    def __init__(
        self, announce: Announce, policy: Policy, profile: Profile, timeline: Timeline, latency: Latency, store: Store, *, hand_back: bool
    ) -> None:
        self.id: ReplicaId = announce.replica
        self._timeline, self._latency, self._store = timeline, latency, store
        settings = ReplicaSettings(depth=latency.depth, lead_s=latency.lead_s, hand_back=hand_back)
        self.core = ReplicaCore(policy, profile, epoch=1, settings=settings)
        self.worker = WorkerCore(
            announce.replica,
            announce.incarnation,
            kv_blocks=announce.kv_blocks,
            block_tokens=announce.block_tokens,
            context_tokens=announce.context_tokens,
            max_slots=announce.max_slots,
        )
        self._engine = VirtualEngine(profile)
        self._alarm = Alarm(timeline, self.core.wake_at_unix_s, self._tick)
        self._offers: list[Offer] = []
        self._replies: dict[tuple[RequestKey, int], Reply] = {}
        self._times: dict[int, array[float] | None] = {}  # by slot
        self._plan_came_s: dict[int, float] = {}
        self._last_end_s = 0.0
        self._work_since_s = 0.0
        self.preempted = 0
        self.worker.resync(1, 1)
        self._feed(Synced(announce, 1, self.worker.next_seq, self.worker.ack_seq, ()))

    # ------------------------------------------------------------ the planner's shell

    def offer(self, offer: Offer, reply: Reply) -> None:
        """Offers that come at one instant are decided together."""
        self._replies[offer.key, offer.attempt] = reply
        self._offers.append(offer)
        if len(self._offers) == 1:
            self._timeline.after(0.0, self._decide)

    def _decide(self) -> None:
        offers, self._offers = self._offers, []
        self._feed(Offered(offers))

    def _tick(self) -> None:
        self._feed(Tick())

    def _acked(self, ack: PlanAck) -> None:
        self._feed(Acked(ack))

    def digest(self) -> Digest:
        digest = self.core.digest(planner="planner", now_unix_s=self._timeline.now_s)
        assert digest is not None
        return digest

    def _feed(self, event: ReplicaEvent) -> None:
        timeline, latency = self._timeline, self._latency
        for action in self.core.handle(event, now_unix_s=timeline.now_s):
            match action:
                case SendPlan(plan):
                    timeline.after(latency.plan_s, self._plan_comes, plan)
                case SendHold(hold):
                    timeline.after(latency.hold_s, self._hold_comes, hold)
                case Answer(key, attempt, answer):
                    timeline.after(latency.answer_s, self._replies.pop((key, attempt)), answer)
                case NeedResync(reason):
                    raise AssertionError(f"{self.id} at {timeline.now_s} s: {reason}")
        self._alarm.reset()

    # ------------------------------------------------------------ the worker's shell

    def _hold_comes(self, hold: Hold) -> None:
        record, body = self._store.record(hold.key), self._store.body(hold.key)
        if not self.worker.held:
            self._work_since_s = self._timeline.now_s
        answer = self.worker.hold(hold, record, body)
        if answer.held:
            self._times[hold.slot] = self._store.token_times(hold.key)
        done = HoldDone(hold.slot, answer.held, answer.reason, answer.in_doubt)
        self._timeline.after(self._latency.held_s, self._feed, done)

    def _plan_comes(self, plan: BatchPlan) -> None:
        self._plan_came_s[plan.seq] = self._timeline.now_s
        self.preempted += len(plan.preempted) // 4
        refused = self.worker.plan(plan)
        assert refused is None, f"{self.id} at {self._timeline.now_s} s: plan {plan.seq} refused: {refused.reason}"
        self._go_on()

    def _go_on(self) -> None:
        """The engine loop: while nothing runs and there is something to do."""
        worker = self.worker
        while not worker.running:
            if (finished := worker.between()) is not None:
                self._stored(finished)
            turn = worker.begin()
            if turn is None:
                return
            done, exec_s = self._engine.run(turn)
            if turn.plan is not None:
                self._timeline.after(exec_s, self._end, turn, done, self._timeline.now_s, exec_s)

    def _end(self, turn: Turn, done: list[TurnDone], began_s: float, exec_s: float) -> None:
        assert turn.plan is not None
        now_s, idle_s = self._timeline.now_s, 0.0
        if turn.work:
            came_s = self._plan_came_s.pop(turn.plan.seq)
            idle_s = max(0.0, came_s - max(self._last_end_s, self._work_since_s))
            self._last_end_s = now_s
            for work, did in zip(turn.work, done, strict=True):
                if did.tokens and (times := self._times[work.slot]) is not None:
                    times.append(now_s)
        finished = self.worker.finish(done, started_unix_s=began_s, ended_unix_s=now_s, exec_s=exec_s, idle_s=idle_s)
        if not self.worker.held:
            self._plan_came_s.clear()
        self._stored(finished)
        self._go_on()

    def _stored(self, finished: Finished) -> None:
        self._timeline.after(self._latency.ack_s, self._acked, finished.ack)
        for over in finished.overs:
            self._timeline.after(self._latency.ack_s + self._latency.over_s, self._store.over, self, over)

    def check(self) -> None:
        """Raises AssertionError unless the books balance."""
        self.core.check()
        self.worker.check()
