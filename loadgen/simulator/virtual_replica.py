"""One replica in virtual time: the planner's core and a worker, joined as their live shells join
them.

With no latency the replica leaps. While the policy's choice stays right (Choice.repeats) and no
prefill and no output ends, iterations differ only by their contexts: their ends are computed
beforehand and stand on the timeline as one event. A digest or an event in the meantime finds the
replica as it is at that instant; if the event makes the choice stale, the leap ends with the
iteration then under way. Iterations in which decodes draft follow one another without an ack and a
plan for each (drafting.py). tests/loadgen/simulator/test_leap.py and test_draft_leap.py compare
both with the run without leaps.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol, assert_never

from msgspec import structs

from loadgen.simulator.accounts import Accounts
from loadgen.simulator.latency import Latency, Route
from loadgen.simulator.misjudged import BatchTime
from loadgen.simulator.timeline import Alarm, Timeline
from loadgen.simulator.virtual_worker import VirtualWorker
from shared.core.replica.events import (
    Acked,
    Answer,
    Heartbeat,
    HoldDone,
    Leapt,
    NeedResync,
    Offered,
    ReplicaEvent,
    ReplicaSettings,
    SendHold,
    SendPlan,
    Synced,
)
from shared.core.replica.replica import ReplicaCore
from shared.core.tick import Tick
from shared.perf.draft import Draft
from shared.perf.iteration_time import Profile
from shared.policy.acceptance import Acceptance
from shared.policy.seam import Policy
from shared.prefix import Chain
from shared.schemas import (
    Announce,
    AttemptOver,
    BatchPlan,
    Body,
    Digest,
    Hold,
    Offer,
    OfferAccepted,
    OfferAnswer,
    PlanAck,
    Record,
)
from shared.vocabulary import ReplicaId, RequestKey, Role

Reply = Callable[[OfferAnswer], None]

LEAP_MOST = 4096  # iterations; settling a leap before its end copies the rest of it


class Store(Protocol):
    """The part of the fleet that a replica calls."""

    def record(self, key: RequestKey) -> Record: ...

    def body(self, key: RequestKey) -> Body: ...

    def chain(self, key: RequestKey) -> Chain:
        """The chain of its prompt and output; empty: it shares nothing with others."""

    def token_times(self, key: RequestKey) -> "array[float]":
        """The array that keeps the instants of this request's tokens."""

    def computed(self, replica: "VirtualReplica", key: RequestKey, hashes: int) -> None:
        """So much of a request that goes on elsewhere is computed here."""

    def fetch(
        self, replica: "VirtualReplica", hold: Hold, then: Callable[[Hold, int], None]
    ) -> None:
        """Call `then` once the KV of this request has come here, with how many hashes of it."""

    def over(self, replica: "VirtualReplica", over: AttemptOver) -> None:
        """An attempt is over; its ack is stored."""


class VirtualReplica:
    """One replica; `rng` draws its latencies. The planner knows `profile` and `draft`; iterations
    take as long as `batch_s` and `engine_draft` say. No message is lost here, so a resync or a
    refused plan is a bug of the cores.
    """

    def __init__(
        self,
        announce: Announce,
        policy: Policy,
        profile: Profile,
        draft: Draft | None,
        acceptance: Acceptance,
        timeline: Timeline,
        latency: Latency,
        rng: Random,
        store: Store,
        *,
        hand_back: bool,
        leaps: bool = True,
        accounts: bool = False,
        batch_s: BatchTime,
        engine_draft: Draft | None,
    ) -> None:
        self.id: ReplicaId = announce.replica
        self.announce = announce
        self._timeline, self._latency, self._store = timeline, latency, store
        self._rng = rng
        self._plans = Route(timeline, latency.plan, rng)
        self._acks = Route(timeline, latency.ack, rng)
        # plans and acks take no time, so they are handed over within the call
        self._at_once = latency.plan.median_s == latency.ack.median_s == 0.0
        self._accounts = Accounts(announce.replica) if accounts else None
        self._leaps = leaps and not accounts and latency.depth == 1 and self._at_once
        settings = ReplicaSettings(depth=latency.depth, lead_s=latency.lead_s, hand_back=hand_back)
        self.core = ReplicaCore(policy, profile, epoch=1, settings=settings, draft=draft)
        self.worker = VirtualWorker(announce, batch_s, engine_draft, acceptance)
        self._alarm = Alarm(timeline, self.core.wake_at_unix_s, self._tick)
        self._role = Role.BOTH  # of one whose role is not fixed
        self._offers: list[Offer] = []
        self._replies: dict[tuple[RequestKey, int], Reply] = {}
        self._plan_came_s: deque[float] = deque()  # of plans not yet done, in order
        self._last_end_s = 0.0
        self._work_since_s = 0.0
        # The iteration under way, and those that may follow it: their ends and durations. An end
        # on the timeline with an older `_serial` is void.
        self._began_s = 0.0
        self._ends_s: list[float] = []
        self._exec_s: list[float] = []
        self._serial = 0
        self._drafted = 0  # iterations of a leap over drafts, not yet settled
        self._dead = False
        self.preempted = 0
        self._feed(Synced(announce, 1, 1, 0, ()))

    # ------------------------------------------------------------ the planner's shell

    def offer(self, offer: Offer, reply: Reply) -> None:
        """Take an offer. Offers that arrive at one instant are decided together."""
        self._replies[offer.key, offer.attempt] = reply
        self._offers.append(offer)
        if len(self._offers) == 1:
            self._timeline.after(0.0, self._decide)

    def _decide(self) -> None:
        offers, self._offers = self._offers, []
        self._feed(Offered(offers))

    def _tick(self) -> None:
        self._feed(Tick())

    def digest(self) -> Digest:
        self.settle()
        digest = self.core.digest(planner="planner", now_unix_s=self._timeline.now_s)
        assert digest is not None
        return digest

    def die(self, why: str = "") -> list[AttemptOver]:
        """The worker dies, or leaves for `why`, and its planner has nothing to plan for any more.
        Returns the attempts as the log has them. Offers get no answer.
        """
        self.settle()
        self._dead = True
        self._serial += 1
        return self._told(self.worker.lose(why))

    def leave(self, leaves_unix_s: float, receivers: int) -> None:
        """A heartbeat of the worker says until when it stays."""
        self.announce = structs.replace(self.announce, draining=True, leaves_unix_s=leaves_unix_s)
        self._feed(Heartbeat(self.announce, receivers, self._role))

    def serve(self, role: Role) -> None:
        """A heartbeat says what the replica serves from now on, unless its role is fixed."""
        if self.announce.role is Role.AUTO and role is not self._role:
            self._role = role
            self._feed(Heartbeat(self.announce, role=role))

    def unanswered(self) -> list[Reply]:
        """The replies that are owed to offers."""
        replies = list(self._replies.values())
        self._replies.clear()
        return replies

    def _feed(self, event: ReplicaEvent) -> None:
        if self._dead:
            return
        timeline, latency, rng = self._timeline, self._latency, self._rng
        self.settle()
        for action in self.core.handle(event, now_unix_s=timeline.now_s):
            match action:
                case SendPlan(plan):
                    if self._at_once:
                        self._plan_comes(plan)
                    else:
                        self._plans.send(self._plan_comes, plan)
                case SendHold(hold):
                    timeline.after(latency.hold.draw_s(rng), self._hold_comes, hold)
                case Answer(key, attempt, answer):
                    reply = self._replies.pop((key, attempt))
                    timeline.after(latency.answer.draw_s(rng), reply, answer)
                case NeedResync(reason):
                    raise AssertionError(f"{self.id} at {timeline.now_s} s: {reason}")
                case _:
                    assert_never(action)
        if len(self._ends_s) > 1 and self.core.repeats <= 1:
            self._cut()
        self._alarm.reset()

    # ------------------------------------------------------------ the worker's shell

    def _hold_comes(self, hold: Hold) -> None:
        if not self._dead:
            self._store.fetch(self, hold, self._held)

    def _held(self, hold: Hold, come: int) -> None:
        """The worker takes a request in, of which so many hashes have come from another replica."""
        if self._dead:
            return
        now_s = self._timeline.now_s
        record, body = self._store.record(hold.key), self._store.body(hold.key)
        if not self.worker.held:
            self._work_since_s = now_s
        times, chain = self._store.token_times(hold.key), self._store.chain(hold.key)
        kv_tokens = self.worker.prefixes.bring_in(chain[:come], now_s) if come else 0
        self.worker.hold(hold, record, body, times, chain)
        if self._accounts is not None:
            self._accounts.held(hold, record, now_s)
        held_s = self._latency.held.draw_s(self._rng)
        answer = OfferAccepted(kv_tokens=kv_tokens)
        self._timeline.after(held_s, self._feed, HoldDone(hold.slot, answer))

    def _plan_comes(self, plan: BatchPlan) -> None:
        if self._dead:
            return
        self._plan_came_s.append(self._timeline.now_s)
        self.preempted += len(plan.preempted) // 4
        self.worker.plan(plan)
        if self._accounts is not None:
            self._accounts.planned(plan)
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next plan, unless one runs or there is none."""
        now_s = self._timeline.now_s
        if self.worker.running or (exec_s := self.worker.begin(now_s)) is None:
            return
        alike = self.worker.alike(min(self.core.repeats, LEAP_MOST)) if self._leaps else []
        self._run(alike if len(alike) > 1 else [exec_s])

    def _run(self, exec_s: list[float]) -> None:
        """Iterations that take these seconds each begin, one after another."""
        ends_s = self._began_s = self._timeline.now_s
        self._exec_s, self._ends_s = exec_s, []
        for each_s in exec_s:
            ends_s += each_s
            self._ends_s.append(ends_s)
        self._serial += 1
        self._timeline.at(ends_s, self._end, self._serial)

    def _again(self) -> bool:
        """The iteration under way ends, and the next one, alike but for its drafts, begins. False:
        no such iteration may follow.
        """
        if not (self._leaps and self.worker.drafts and self.core.repeats > 1 + self._drafted):
            return False
        now_s = self._timeline.now_s
        next_s = self.worker.again(now_s, self._exec_s[0])
        if next_s is None:
            return False
        self._drafted += 1
        self._last_end_s = now_s
        self._run([next_s])
        return True

    def settle(self) -> None:
        """Account for the iterations of a leap that have ended by now. The one under way stays, as
        if its plan had just come.
        """
        if self._drafted:
            self._drafted = 0
            drafted, end_s = self.worker.settle(), self._last_end_s
            exec_s = sum(each.exec_s for each in drafted)
            self.core.handle(Leapt(len(drafted), end_s, exec_s, drafted), now_unix_s=end_s)
        if len(self._ends_s) <= 1:
            return
        done = min(bisect_right(self._ends_s, self._timeline.now_s), len(self._ends_s) - 1)
        if not done:
            return
        ends_s, exec_s = self._ends_s[:done], sum(self._exec_s[:done])
        self._ends_s, self._exec_s = self._ends_s[done:], self._exec_s[done:]
        self._began_s = self._last_end_s = ends_s[-1]
        self.worker.leap(ends_s, exec_s)
        self.core.handle(Leapt(done, ends_s[-1], exec_s), now_unix_s=ends_s[-1])

    def _cut(self) -> None:
        """End the leap with the iteration under way."""
        self._ends_s, self._exec_s = self._ends_s[:1], self._exec_s[:1]
        self._serial += 1
        self._timeline.at(self._ends_s[0], self._end, self._serial)

    def _end(self, serial: int) -> None:
        if serial != self._serial or self._again():
            return
        self.settle()
        now_s, idle_s, began_s, exec_s = self._timeline.now_s, 0.0, self._began_s, self._exec_s[-1]
        came_s = self._plan_came_s.popleft()
        if self.worker.worked:
            idle_s = max(0.0, came_s - max(self._last_end_s, self._work_since_s))
            self._last_end_s = now_s
        self._ends_s = []
        ack, overs = self.worker.finish(
            started_unix_s=began_s, ended_unix_s=now_s, exec_s=exec_s, idle_s=idle_s
        )
        if self._accounts is not None:
            self._accounts.done(ack)
        for key, hashes in self.worker.prefixes.computed():
            self._store.computed(self, key, hashes)
        self._stored(ack, self._told(overs))
        self._go_on()

    def _told(self, overs: list[AttemptOver]) -> list[AttemptOver]:
        """The same attempts, with the accounts of their time where these are kept."""
        return overs if self._accounts is None else self._accounts.over(overs)

    def _stored(self, ack: PlanAck, overs: list[AttemptOver]) -> None:
        stored_s = self._timeline.now_s
        if self._at_once:
            self._feed(Acked(ack))
        else:
            stored_s = self._acks.send(self._feed, Acked(ack))
        for over in overs:
            over_s = self._latency.over.draw_s(self._rng)
            self._timeline.at(stored_s + over_s, self._store.over, self, over)

    def check(self) -> None:
        """Raises AssertionError unless the books balance."""
        self.core.check()
        self.worker.check()
