"""ReplicaCore: the brain of one replica. It keeps the request table, sends plans ahead, and
corrects the table by acks; the policy decides within it.

Sans-IO: `handle(event, now_unix_s=...) -> actions`; `wake_at_unix_s()` says when it next wants a
Tick. One implementation for all policies, live and simulated. docs/architecture.md draws the
pipeline. The file reads from the events that come in to the actions that go out; each of its parts
has a file of its own: offers, slots, rows (request_table), plans in flight (prediction),
acks (reconciliation), what the policy has chosen ahead (planned_ahead), the orders of a plan.
"""

import math
from collections.abc import Iterable, Sequence
from typing import assert_never

import numpy as np

from shared.columns import unpack
from shared.core.leaving import Leaving
from shared.core.prefixes.kept import KeptPrefixes, index_of
from shared.core.replica.digest import Counters, Figures, digest_of, figures_of, loads_of, roster
from shared.core.replica.events import (
    Acked,
    Heartbeat,
    HoldDone,
    Leapt,
    NeedResync,
    Offered,
    Refused,
    ReplicaAction,
    ReplicaEvent,
    ReplicaSettings,
    SendPlan,
    Synced,
)
from shared.core.replica.in_flight import InFlightPlan
from shared.core.replica.learning import Lead, Learning
from shared.core.replica.offers import OfferDesk
from shared.core.replica.orders import Orders, gives_way, write_orders
from shared.core.replica.planned_ahead import PlannedAhead
from shared.core.replica.prediction import Prediction
from shared.core.replica.reconciliation import Landing, OutOfSync, Reconciliation
from shared.core.replica.request_table import RequestTable
from shared.core.tick import Tick
from shared.core.worker.draft_yields import merged
from shared.perf.draft import Draft
from shared.perf.iteration_time import Profile
from shared.policy.seam import Admission, Ended, Policy, View
from shared.request_timeline import Neighbour
from shared.schemas import Announce, BatchPlan, Digest, Offer, PlanAck, ResyncEntry, RosterEntry
from shared.vocabulary import FinishReason, Role

AGAIN_S = 0.0005  # a policy that waits is not asked more often than this


class ReplicaCore:
    """Plans for one replica under one lease epoch."""

    def __init__(
        self,
        policy: Policy,
        profile: Profile,
        *,
        epoch: int,
        settings: ReplicaSettings | None = None,
        draft: Draft | None = None,
    ) -> None:
        self._policy, self._epoch = policy, epoch
        self._set = settings or ReplicaSettings()
        lead = Lead(self._set.lead_s, self._set.lead_max_s)
        self._learned = Learning(policy, profile, draft, lead)
        self._announce: Announce | None = None
        self._table = RequestTable(slots=1, kv_blocks=0, block_tokens=1, context_tokens=1)
        self._ahead = Prediction(self._table, self._learned.draft)
        self._reconciliation = Reconciliation(self._table, self._ahead)
        self._accepted_shares: tuple[float, ...] = ()
        self.synced = False
        self._sync = 0
        self._seq = 0  # of the plan to send next
        self._acked_seq = 0
        self._desk = OfferDesk(self._learned.profile)
        self._planned = PlannedAhead()
        self._leaving = Leaving()
        self._role = Role.BOTH  # of one whose role is not fixed
        self.kept = KeptPrefixes()
        # when the policy wants to be asked although nothing has happened
        self._again_unix_s = math.inf
        self._idle = True  # the policy had nothing to run and nothing has happened since
        self._last_end_unix_s = -math.inf  # the end of the newest acked iteration
        self._next_expiry_unix_s = math.inf
        self._expired: set[int] = set()
        self.counters = Counters()

    # ------------------------------------------------------------ events in, actions out

    def handle(self, event: ReplicaEvent, *, now_unix_s: float) -> list[ReplicaAction]:
        """Actions, in order. Timers that are due fire after the event's own changes, once.

        After a Leapt they wait for the event that made the driver look. After a HoldDone they wait
        for the next event, or the wake-up that is due at once: an admission waits for the answer,
        and a plan takes longer than that.
        """
        actions: list[ReplicaAction] = []
        try:
            self._handle(event, now_unix_s, actions)
            if self.synced and not isinstance(event, HoldDone | Leapt):
                self._on_time(now_unix_s, actions)
        except OutOfSync as why:
            self._lose_sync(str(why), actions)
        return actions

    def _handle(self, event: ReplicaEvent, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        match event:
            case Synced():
                self._on_synced(event, now_unix_s)
            case Offered():
                facts = self._announce if self.synced else None
                actions += self._desk.receive(event.offers, facts, self._table, now_unix_s)
                if self._desk.undecided:
                    self._decide(now_unix_s, actions)
            case HoldDone():
                self._on_hold_done(event, now_unix_s, actions)
            case Acked():
                self._on_acked(event.ack, now_unix_s)
            case Leapt():
                self._on_leapt(event)
            case Refused():
                raise OutOfSync(event.reason)
            case Heartbeat(announce, receivers, role):
                self._on_heartbeat(announce, receivers, role)
            case Tick():
                pass
            case _:
                assert_never(event)

    def wake_at_unix_s(self) -> float | None:
        if not self.synced:
            return None
        wake = min(self._next_expiry_unix_s, self._again_unix_s)
        if self._ahead.flights:
            wake = min(wake, self._overdue_unix_s())
        if not self._idle and len(self._ahead.flights) < self._set.depth:
            wake = min(wake, self._plan_at_unix_s())
        return None if wake == math.inf else wake

    # ------------------------------------------------------------ the worker's state

    def _on_synced(self, event: Synced, now_unix_s: float) -> None:
        """Begin anew from what the worker reports. Holds that it has not answered stay reserved."""
        facts = self._announce = event.announce
        self._accepted_shares = merged(facts.draft_yields)
        before = self._table
        self._table = RequestTable(
            slots=facts.max_slots,
            kv_blocks=facts.kv_blocks,
            block_tokens=facts.block_tokens,
            context_tokens=facts.context_tokens,
            draft_kv_blocks=facts.draft_kv_blocks,
        )
        self._ahead = Prediction(self._table, self._learned.draft, chains=facts.longest_chain > 0)
        self._reconciliation = Reconciliation(
            self._table,
            self._ahead,
            incarnation=facts.incarnation,
            epoch=self._epoch,
            ack_seq=event.ack_seq,
        )
        self._leaving.synced(facts)
        self.kept = index_of(facts, event.kept, event.moved, self._epoch)
        self._planned.forget()
        self._expired.clear()
        self._next_expiry_unix_s = math.inf
        self._sync, self._seq = event.sync, event.next_seq
        self._acked_seq = event.next_seq - 1
        for entry in self._desk.begin(facts, self.kept, event.entries, before, self._table):
            self._admit_row(entry, now_unix_s)
        self._table.share(event.shared_blocks, event.draft_shared_blocks)
        self.synced, self._idle = True, False
        self._last_end_unix_s = now_unix_s

    def _on_heartbeat(self, announce: Announce, receivers: int, role: Role) -> None:
        """An ack that the last heartbeat reported, and that has not come by this one, is lost."""
        last = self._announce
        if not self.synced or last is None or announce.incarnation != last.incarnation:
            return
        self._announce, self._role = announce, role
        self._leaving.heard(announce, receivers)
        self._desk.fetching.heard(announce)
        self._idle = self._idle and not self._leaving
        if last.ack_seq > self._reconciliation.ack_seq:
            raise OutOfSync(f"ack {last.ack_seq} was missed")

    def _lose_sync(self, reason: str, actions: list[ReplicaAction]) -> None:
        if self.synced:
            self.synced = False
            self.counters.resyncs += 1
            actions.append(NeedResync(reason))

    # ------------------------------------------------------------ offers and holds

    def _decide(self, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        def admit(promised: Sequence[Offer], asked: Sequence[Offer]) -> Sequence[Admission]:
            view, seen = self._view(self._start_unix_s(now_unix_s), [*promised, *asked])
            view.promised = seen[: len(promised)]
            return self._policy.admit(view, seen[len(promised) :])

        epoch, sync = self._epoch, self._sync
        actions += self._desk.decide(admit, self._table, now_unix_s, epoch=epoch, sync=sync)

    def _on_hold_done(
        self, event: HoldDone, now_unix_s: float, actions: list[ReplicaAction]
    ) -> None:
        held = self._desk.held(event, synced=self.synced)
        if held is None:
            return
        if held.begins is not None and not self._table.holds(event.slot):
            self._admit_row(held.begins, now_unix_s)
        if held.doubt:
            self._lose_sync(held.doubt, actions)
        actions += held.answers

    # ------------------------------------------------------------ acks

    def _on_acked(self, ack: PlanAck, now_unix_s: float) -> None:
        if not self.synced or not self._reconciliation.is_next(ack):
            return
        self.kept.change(ack.kept, ack.dropped, ack.moved)
        flight = self._ahead.flights.popleft() if ack.plan_seq else None
        landing = None if flight is None else self._land(flight, ack, now_unix_s)
        if ack.answering:
            self._end_thinking(ack)
        ended = self._end(ack)
        if any(self._table.holds(slot) for slot in unpack(ack.skipped).tolist()):
            raise OutOfSync("the worker does not have what was planned")
        if self._ahead.misses_an_end:
            raise OutOfSync("the worker goes on with what should have ended")
        self._desk.slots.release(self._acked_seq)
        if flight is not None and landing is not None and landing.shape.tokens:
            self.counters.acks += 1
            self._learned.ran(ack, flight, landing, ended, now_unix_s)
        elif ended:
            self._learned.ended(ended, now_unix_s)
        if ack.ended:
            self._changed()
        self._idle = False

    def _land(self, flight: InFlightPlan, ack: PlanAck, now_unix_s: float) -> Landing:
        """Correct the table and predicted ends by what the worker did."""
        self._acked_seq = flight.seq
        landing = self._reconciliation.reconcile(flight, ack)
        self.counters.cached(flight, ack)
        self._ahead.share(ack.shared_blocks, ack.draft_shared_blocks)
        if landing.missed:
            self.counters.mispredicted_entries += landing.missed
            self._changed()
        self._last_end_unix_s = now_unix_s - min(max(now_unix_s - ack.ended_unix_s, 0.0), 0.005)
        self._ahead.retime(self._last_end_unix_s, self._learned.profile)
        return landing

    def _end_thinking(self, ack: PlanAck) -> None:
        """Go over to the response's pace; choices made for the old one may not suit it."""
        slots, thinking_tokens = unpack(ack.answering), unpack(ack.thinking_tokens)
        for slot, tokens in zip(slots.tolist(), thinking_tokens.tolist(), strict=True):
            if self._table.holds(slot):
                self._table.answers(slot, tokens)
                self._changed()

    def _end(self, ack: PlanAck) -> list[Ended]:
        """Remove the rows of requests that ended. Returns their ends, from which policies learn."""
        ended: list[Ended] = []
        for slot, why in ack.ended:
            if self._table.holds(slot):
                gone = self._remove(slot, ack.ended_unix_s)
                if why in (FinishReason.STOP, FinishReason.LENGTH):
                    ended.append(gone)
            elif slot in self._desk.reserved:
                self._desk.reserved[slot].over = True
        return ended

    def _on_leapt(self, event: Leapt) -> None:
        """Bring table and policy to the state after that many acks."""
        n = event.iterations
        self.counters.plans += n
        self.counters.acks += n
        self._learned.leapt(event, self._ahead.flights[0], self._table)
        self._ahead.leap(event, self._learned.profile)
        self._planned.leapt(n)
        self._last_end_unix_s = event.ended_unix_s

    # ------------------------------------------------------------ rows

    def _admit_row(self, entry: ResyncEntry, now_unix_s: float) -> None:
        slot, offer = entry.slot, entry.offer
        self._table.add(
            slot,
            offer,
            computed_tokens=entry.computed_tokens,
            generated_tokens=entry.generated_tokens,
            draft_tokens=entry.draft_tokens,
        )
        self._desk.slots.assign(offer, slot)
        self._desk.fairness.seat(slot, self._table, now_unix_s)
        leaves_unix_s = float(self._table.leaves_unix_s()[self._table.row_of[slot]])
        self._next_expiry_unix_s = min(self._next_expiry_unix_s, leaves_unix_s)
        if entry.generated_tokens >= offer.max_tokens:
            self._table.leave(slot)
        self._changed()

    def _remove(self, slot: int, at_unix_s: float) -> Ended:
        table = self._table
        row = int(table.row_of[slot])
        generated = int(table.generated_tokens[row]) - self._ahead.overcounted(slot)
        computed = int(table.computed_tokens[row]) if table.kv_held_blocks[row] else 0
        offer = table.remove(slot)
        made, last = generated - offer.generated_tokens, self._seq - 1
        self._desk.leave(
            slot, offer, at_unix_s, last_seq=last, prompt_tokens=computed, output_tokens=made
        )
        self._expired.discard(slot)
        self._ahead.releasing.discard(slot)
        return Ended(offer.application, offer.prompt_tokens, offer.max_tokens, generated)

    # ------------------------------------------------------------ time

    def _on_time(self, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        if self._ahead.flights and now_unix_s >= self._overdue_unix_s():
            raise OutOfSync(f"ack {self._ahead.flights[0].seq} is overdue")
        if now_unix_s >= self._next_expiry_unix_s:
            self._expire(now_unix_s)
        if now_unix_s >= self._again_unix_s:
            self._changed()
        while (
            not self._idle
            and len(self._ahead.flights) < self._set.depth
            and now_unix_s >= self._plan_at_unix_s() - 1e-9
        ):
            plan = self._plan(now_unix_s)
            if plan is None:
                self._idle = True
            else:
                actions.append(SendPlan(plan))

    def _start_unix_s(self, now_unix_s: float) -> float:
        """The predicted begin of the next plan."""
        flights = self._ahead.flights
        return max(flights[-1].end_unix_s, now_unix_s) if flights else now_unix_s

    def _plan_at_unix_s(self) -> float:
        """The instant at which the next plan leaves: a measured lead before the predicted end of
        the running iteration; at once if nothing runs.
        """
        flights, lead_s = self._ahead.flights, self._learned.lead.seconds
        return flights[-1].end_unix_s - lead_s if flights else -math.inf

    def _overdue_unix_s(self) -> float:
        first = self._ahead.flights[0]
        return first.end_unix_s + self._set.overdue_s + 5 * first.predicted_s

    def _expire(self, now_unix_s: float) -> None:
        table = self._table
        leaves_unix_s = table.leaves_unix_s()
        late = np.flatnonzero(leaves_unix_s <= now_unix_s)
        self._expired.update(int(table.slot[row]) for row in late)
        later = leaves_unix_s[leaves_unix_s > now_unix_s]
        self._next_expiry_unix_s = float(later.min(initial=math.inf))
        if len(late):
            self._changed()

    # ------------------------------------------------------------ plans out

    def _changed(self) -> None:
        """Something other than progress happened: ask the policy afresh."""
        self._planned.forget()
        self._again_unix_s = math.inf
        self._idle = False

    def _plan(self, now_unix_s: float) -> BatchPlan | None:
        """The next plan, its effects written into the table; None if it would be empty."""
        table, start = self._table, self._start_unix_s(now_unix_s)
        choice = self._planned.next(table, lambda: self._policy.plan(self._view(start)[0]))
        assert self._policy.declared.drops or all(
            why != FinishReason.DROPPED for _, why in choice.release
        ), "an undeclared drop"
        moving = self._leaving.give_up(self._view(start)[0]) if self._leaving else ()
        orders = write_orders(
            choice, self._expired, moving, table, self._ahead, hand_back=self._set.hand_back
        )
        if moving:
            self._planned.forget()
        self._expired.clear()
        if orders.relegated:  # these may have waited too long for a first token already
            leaves_unix_s = float(table.leaves_unix_s().min(initial=math.inf))
            self._next_expiry_unix_s = min(self._next_expiry_unix_s, leaves_unix_s)
        waits = math.isfinite(choice.again_unix_s)
        if waits and not len(choice.slots):
            self._again_unix_s = max(choice.again_unix_s, now_unix_s + AGAIN_S)
        entries = self._ahead.entries(choice)
        if entries.cut:
            self._planned.forget()
        nothing_runs = not len(entries.slots) and not self._ahead.flights and table.live
        if nothing_runs and (len(choice.slots) or not (orders.take or waits)):
            self._make_room(int(choice.slots[0]) if len(choice.slots) else None, orders)
        if not (len(entries.slots) or orders.take or orders.promoted):
            return None
        assert self._announce is not None
        flight = self._ahead.launch(self._seq, entries, start, self._learned.profile)
        self._seq += 1
        self.counters.plans += 1
        return orders.plan(
            flight,
            self._announce,
            epoch=self._epoch,
            sync=self._sync,
            decodes_s=self._learned.decodes_s(flight.shape),
        )

    def _make_room(self, first: int | None, orders: Orders) -> None:
        """The last resort: one request gives up its KV, so that another can run."""
        victim = gives_way(self._table, first)
        if victim is not None:
            self.counters.forced_preemptions += 1
            orders.preempted.append(victim)
            self._ahead.preempt(victim)
            self._planned.forget()

    def _view(
        self, start_unix_s: float, offers: Sequence[Offer] = ()
    ) -> tuple[View, Sequence[Offer]]:
        """The view and these offers, as the policy sees them."""
        assert self._announce is not None
        self._ahead.date_newest_tokens()
        self._table.expect(self.kept)
        view = self._table.view(
            start_unix_s,
            self._learned.profile.now,
            self._learned.draft.now,
            self._announce.pool,
            self._accepted_shares,
            self._announce.longest_chain,
        )
        offers = self._desk.fetching.seen(offers)
        fairness = self._desk.fairness
        if fairness.contested:
            view.importance, offers = fairness.importance(self._table, offers)
        return view, offers

    # ------------------------------------------------------------ snapshots for others

    @property
    def idle(self) -> bool:
        """True if nothing is held, promised or in flight."""
        return not self._ahead.flights and self._desk.idle and self._table.used == 0

    def figures(self, now_unix_s: float) -> Figures:
        """The numbers that the planner exports."""
        return figures_of(self._table, self._learned, now_unix_s)

    @property
    def repeats(self) -> int:
        """As PlannedAhead.repeats: the iterations that a driver of virtual time may leap over."""
        return 0 if self._leaving else self._planned.repeats(self._table, self._ahead.flights)

    def digest(self, *, planner: str, now_unix_s: float) -> Digest | None:
        """The digest for all routers; None before the first resync. Prefixes are told once."""
        if self._announce is None or not self.synced:
            return None
        return digest_of(
            self._announce,
            self._table,
            self._desk.fetching.seen(self._desk.promised),
            self._learned.profile,
            planner=planner,
            now_unix_s=now_unix_s,
            free_slots=self._desk.slots.free,
            best_effort_waiting=self._set.best_effort_waiting,
            prefixes=self.kept.tell(),
            role=self._role if self._announce.role is Role.AUTO else self._announce.role,
        )

    def roster(self, slots: Iterable[int]) -> list[RosterEntry]:
        """The requests in these slots, or in all where none is named."""
        return roster(self._table, slots)

    def loads(self) -> tuple[Neighbour, ...]:
        """The requests whose standard prefills come before that of a request declined now."""
        promised = self._desk.fetching.seen(self._desk.promised)
        return loads_of(self._table, promised, self._learned.profile)

    def check(self) -> None:
        """Raises AssertionError unless the table, the slots and the plans in flight agree."""
        self._table.check()
        self._desk.slots.check(
            held=set(self._table.offers),
            reserved=set(self._desk.reserved),
            count=self._table.capacity if self.synced else None,
        )
        self._ahead.check(self._set.depth)
