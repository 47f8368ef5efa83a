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
from dataclasses import dataclass
from typing import assert_never

import msgspec
import numpy as np

from shared.columns import pack, unpack
from shared.core.replica.ack_columns import well_formed
from shared.core.replica.digest import best_effort_waiting, digest_of, loads_of
from shared.core.replica.events import (
    Acked,
    Answer,
    Heartbeat,
    HoldDone,
    Leapt,
    NeedResync,
    Offered,
    Refused,
    ReplicaAction,
    ReplicaEvent,
    SendPlan,
    Synced,
    WorkerGone,
)
from shared.core.replica.fairness import Fairness
from shared.core.replica.in_flight import InFlightPlan
from shared.core.replica.lead import Lead
from shared.core.replica.offers import OfferDesk
from shared.core.replica.orders import Orders, gives_way, write_orders
from shared.core.replica.planned_ahead import PlannedAhead
from shared.core.replica.prediction import Prediction
from shared.core.replica.reconciliation import Landing, Reconciliation
from shared.core.replica.request_table import RequestTable
from shared.core.replica.roster import roster
from shared.core.replica.slots import Slots
from shared.core.tick import Tick
from shared.core.worker.draft_yields import merged
from shared.perf.draft import Draft
from shared.perf.draft_correction import DraftCorrection
from shared.perf.iteration_time import Profile
from shared.perf.online import Corrected
from shared.perf.shape import BatchShape
from shared.policy.seam import Admission, Ended, Observation, Policy, View
from shared.request_timeline import Neighbour
from shared.schemas import (
    Announce,
    BatchPlan,
    Digest,
    Offer,
    OfferAccepted,
    OfferDeclined,
    OfferInDoubt,
    OfferNotReady,
    PlanAck,
    RosterEntry,
)
from shared.vocabulary import FinishReason

AGAIN_S = 0.0005  # a policy that waits is not asked more often than this


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pipeline of plans. Depth 1 and lead 0 reproduce the papers' loop without latency."""

    depth: int = 2  # plans the worker has: one running, one waiting
    # first guess of how long before the end of N plan N+1 must leave; adapted to measured idle time
    lead_s: float = 0.004
    lead_max_s: float = 0.030
    # an ack this late after its prediction (plus five times the prediction) means resync
    overdue_s: float = 1.0
    hand_back: bool = True  # relegated requests that have not begun go to the relegation service
    best_effort_waiting: int = 4  # surplus is reported while fewer than this wait


@dataclass(slots=True)
class Counters:
    """Counts that the planner exports, or the simulator reads."""

    plans: int = 0
    acks: int = 0
    resyncs: int = 0
    mispredicted_entries: int = 0
    forced_preemptions: int = 0


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
        self._policy = policy
        self._profile = Corrected(profile)
        self._draft = DraftCorrection(draft)
        self._epoch = epoch
        self._set = settings or ReplicaSettings()
        self._announce: Announce | None = None
        self._table = RequestTable(slots=1, kv_blocks=0, block_tokens=1, context_tokens=1)
        self._ahead = Prediction(self._table, self._draft)
        self._reconciliation = Reconciliation(self._table, self._ahead)
        self._accepted_shares: tuple[float, ...] = ()
        self._synced = False
        self._sync = 0
        self._seq = 0  # of the plan to send next
        self._acked_seq = 0
        self._ack_seq = 0
        self._slots = Slots()
        self._desk = OfferDesk(self._slots)
        self._fairness = Fairness()
        self._planned = PlannedAhead()
        self._lead = Lead(self._set.lead_s, self._set.lead_max_s)
        # when the policy wants to be asked although nothing has happened
        self._again_unix_s = math.inf
        self._idle = True  # the policy had nothing to run and nothing has happened since
        self._last_end_unix_s = -math.inf  # of the newest acked iteration
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
        match event:
            case Synced():
                self._on_synced(event, now_unix_s)
            case Offered():
                self._on_offered(event.offers, now_unix_s, actions)
            case HoldDone():
                self._on_hold_done(event, now_unix_s, actions)
            case Acked():
                self._on_acked(event.ack, now_unix_s, actions)
            case Leapt():
                self._on_leapt(event)
            case Refused():
                self._lose_sync(event.reason, actions)
            case Heartbeat(announce):
                self._on_heartbeat(announce, actions)
            case Tick():
                pass
            case _:
                assert_never(event)
        if self._synced and not isinstance(event, HoldDone | Leapt):
            self._on_time(now_unix_s, actions)
        return actions

    def wake_at_unix_s(self) -> float | None:
        if not self._synced:
            return None
        wake = min(self._next_expiry_unix_s, self._again_unix_s, self._desk.decide_unix_s)
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
        for offer in self._table.offers.values():
            self._fairness.leave(offer)
        self._table = RequestTable(
            slots=facts.max_slots,
            kv_blocks=facts.kv_blocks,
            block_tokens=facts.block_tokens,
            context_tokens=facts.context_tokens,
            draft_kv_blocks=facts.draft_kv_blocks,
        )
        self._ahead = Prediction(self._table, self._draft, chains=facts.longest_chain > 0)
        self._reconciliation = Reconciliation(self._table, self._ahead)
        self._planned.forget()
        self._expired.clear()
        self._next_expiry_unix_s = math.inf
        self._sync = event.sync
        self._seq = event.next_seq
        self._acked_seq = event.next_seq - 1
        self._ack_seq = event.ack_seq
        reserved = self._desk.reserved
        taken = {*reserved, *(entry.slot for entry in event.entries)}
        self._slots.begin(facts.max_slots, taken)
        for reservation in reserved.values():
            self._slots.assign(reservation.offer, reservation.slot)
        answering = {(r.offer.key, r.offer.attempt, r.slot) for r in reserved.values()}
        for entry in event.entries:
            if (entry.offer.key, entry.offer.attempt, entry.slot) in answering:
                continue  # its HoldDone is on the way
            self._admit_row(
                entry.slot,
                entry.offer,
                now_unix_s,
                computed_tokens=entry.computed_tokens,
                generated_tokens=entry.generated_tokens,
                draft_tokens=entry.draft_tokens,
            )
        self._table.share(event.shared_blocks, event.draft_shared_blocks)
        self._synced = True
        self._idle = False
        self._last_end_unix_s = now_unix_s

    def _on_heartbeat(self, announce: Announce, actions: list[ReplicaAction]) -> None:
        """An ack that the last heartbeat reported, and that has not come by this one, is lost."""
        if (
            not self._synced
            or self._announce is None
            or announce.incarnation != self._announce.incarnation
        ):
            return
        if self._announce.ack_seq > self._ack_seq:
            self._lose_sync(f"ack {self._announce.ack_seq} was missed", actions)
        self._announce = announce

    def _lose_sync(self, reason: str, actions: list[ReplicaAction]) -> None:
        if self._synced:
            self._synced = False
            self.counters.resyncs += 1
            actions.append(NeedResync(reason))

    # ------------------------------------------------------------ offers and holds

    def _on_offered(
        self, offers: Sequence[Offer], now_unix_s: float, actions: list[ReplicaAction]
    ) -> None:
        desk = self._desk
        actions += desk.receive(offers, self._unfit)
        if not desk.gathered:
            return
        declared = self._policy.declared
        desk.decide_unix_s = min(desk.decide_unix_s, now_unix_s + declared.gather_s)
        if now_unix_s >= desk.decide_unix_s or desk.gathered >= declared.gather_offers:
            self._decide(now_unix_s, actions)

    def _unfit(self, offer: Offer) -> OfferNotReady | OfferDeclined | None:
        """Why no policy need be asked; None if one must."""
        known_tokens = offer.prompt_tokens + offer.generated_tokens
        if not self._synced or self._announce is None or self._announce.draining:
            return OfferNotReady(reason="not ready")
        if known_tokens >= self._announce.context_tokens:
            return OfferDeclined(reason="prompt exceeds the context")
        if offer.generated_tokens >= offer.max_tokens:
            return OfferDeclined(reason="nothing is left to be made")
        if -(-(known_tokens + 1) // self._table.block_tokens) > self._table.kv_blocks:
            return OfferDeclined(reason="prompt exceeds the KV cache")
        return None

    def _decide(self, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        asked, promised = self._desk.asked, self._desk.promised
        for offer in asked:
            self._fairness.enter(offer, self._table, now_unix_s)
        view, seen = self._view(self._start_unix_s(now_unix_s), [*promised, *asked])
        view.promised = seen[: len(promised)]
        admissions = list(self._policy.admit(view, seen[len(promised) :]))
        free = self._slots.free
        for n, offer in enumerate(asked):
            if admissions[n].accepted and self._fairness.crowds(offer, self._table, free):
                admissions[n] = Admission(False, reason="its tenant has its share of the slots")
            free -= admissions[n].accepted
        actions += self._desk.decide(admissions, epoch=self._epoch, sync=self._sync)
        for offer in asked:
            if self._slots.of(offer) is None:
                self._fairness.leave(offer)

    def _on_hold_done(
        self, event: HoldDone, now_unix_s: float, actions: list[ReplicaAction]
    ) -> None:
        slot = event.slot
        reservation = self._desk.reserved.pop(slot, None)
        if reservation is None:
            return
        offer, copies = reservation.offer, reservation.copies
        match event.answer:
            case OfferAccepted():
                if reservation.over:
                    self._free_reserved(slot, offer)
                elif not self._table.holds(slot):
                    self._admit_row(
                        slot, offer, now_unix_s, generated_tokens=offer.generated_tokens
                    )
                actions += [Answer(offer.key, offer.attempt, OfferAccepted())] * copies
            case OfferDeclined(reason=reason):
                self._free_reserved(slot, offer)
                actions += self._desk.decline(offer, OfferDeclined(reason=reason), copies)
            case WorkerGone():
                self._free_reserved(slot, offer)
                answer = OfferNotReady(reason="the worker is gone")
                actions += self._desk.decline(offer, answer, copies)
            case OfferInDoubt(reason=reason):
                self._slots.forget(offer)
                self._fairness.leave(offer)
                self._lose_sync(f"hold of slot {slot}: {reason}", actions)
                actions += self._desk.decline(offer, OfferInDoubt(reason=reason), copies)
            case _:
                assert_never(event.answer)

    def _free_reserved(self, slot: int, offer: Offer) -> None:
        self._slots.forget(offer)
        self._fairness.leave(offer)
        if self._synced:
            self._slots.give_back(slot)

    # ------------------------------------------------------------ acks

    def _on_acked(self, ack: PlanAck, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        if not self._synced or self._announce is None:
            return
        if fault := self._fault(ack, self._announce.incarnation):
            self._lose_sync(fault, actions)
            return
        if ack.ack_seq <= self._ack_seq:
            return  # doubled, or part of what the resync reported
        self._ack_seq = ack.ack_seq
        flight: InFlightPlan | None = None
        landing: Landing | None = None
        if ack.plan_seq:
            flight = self._ahead.flights.popleft()
            landing = self._land(flight, ack, now_unix_s)
            if landing is None:
                self._lose_sync("an ack of more than was planned", actions)
                return
        if ack.answering:
            self._end_thinking(ack)
        ended = self._end(ack)
        if any(self._table.holds(slot) for slot in unpack(ack.skipped).tolist()):
            self._lose_sync("the worker does not have what was planned", actions)
            return
        if self._ahead.misses_an_end:
            self._lose_sync("the worker goes on with what should have ended", actions)
            return
        self._slots.release(self._acked_seq)
        if flight is not None and landing is not None and landing.shape.tokens:
            self._learn(ack, flight, landing, ended, now_unix_s)
        elif ended:
            self._policy.observe(Observation(now_unix_s, BatchShape(), 0.0, 0.0, ended))
        if ack.ended:
            self._changed()
        self._idle = False

    def _fault(self, ack: PlanAck, incarnation: str) -> str:
        """Why this ack can be neither the next nor a second copy; empty if it can."""
        if ack.incarnation != incarnation:
            return "another incarnation"
        if not well_formed(ack, self._table.capacity):
            return "an ack whose columns do not fit"
        if ack.ack_seq <= self._ack_seq:
            return ""
        if ack.ack_seq != self._ack_seq + 1:
            return f"ack {ack.ack_seq} came after {self._ack_seq}"
        flights = self._ahead.flights
        expected = (self._epoch, flights[0].seq) if flights else None
        if ack.plan_seq and (ack.epoch, ack.plan_seq) != expected:
            return f"ack of plan {ack.plan_seq}, epoch {ack.epoch} was not expected"
        return ""

    def _land(self, flight: InFlightPlan, ack: PlanAck, now_unix_s: float) -> Landing | None:
        """Correct the table and predicted ends by what the worker did; None if it cannot have done
        that.
        """
        self._acked_seq = flight.seq
        landing = self._reconciliation.reconcile(flight, ack)
        if landing is None:
            return None
        self._ahead.share(ack.shared_blocks, ack.draft_shared_blocks)
        if landing.missed:
            self.counters.mispredicted_entries += landing.missed
            self._changed()
        self._last_end_unix_s = now_unix_s - min(max(now_unix_s - ack.ended_unix_s, 0.0), 0.005)
        self._ahead.retime(self._last_end_unix_s, self._profile)
        return landing

    def _end_thinking(self, ack: PlanAck) -> None:
        """Another pace: what was chosen for the old one may not be right for it."""
        slots, thinking_tokens = unpack(ack.answering), unpack(ack.thinking_tokens)
        for slot, tokens in zip(slots.tolist(), thinking_tokens.tolist(), strict=True):
            if self._table.holds(slot):
                self._table.answers(slot, tokens)
                self._changed()

    def _end(self, ack: PlanAck) -> list[Ended]:
        """Remove the rows of requests that ended; what policies learn from."""
        ended: list[Ended] = []
        for slot, why in ack.ended:
            if self._table.holds(slot):
                self._remove(slot, why, ended)
            elif slot in self._desk.reserved:
                self._desk.reserved[slot].over = True
        return ended

    def _learn(
        self,
        ack: PlanAck,
        flight: InFlightPlan,
        landing: Landing,
        ended: list[Ended],
        now_unix_s: float,
    ) -> None:
        """Profile, lead and policy learn from an iteration that ran."""
        self.counters.acks += 1
        drafted_s = ack.drafted_s or flight.draft_s
        self._profile.observe(landing.shape, ack.exec_s - drafted_s, ack.late_s)
        if not flight.draft_begins:
            self._draft.observe(flight.draft_s, ack.drafted_s)
        if flight.follows:
            self._lead.observe(ack.idle_s, ack.exec_s)
        seen = Observation(
            now_unix_s,
            landing.shape,
            flight.predicted_s,
            ack.exec_s,
            ended,
            landing.drafts,
            late_s=ack.late_s,
        )
        self._policy.observe(seen)

    def _on_leapt(self, event: Leapt) -> None:
        """Table and policy as after so many acks; the profile learns from the iteration that is
        acked.
        """
        n, flight = event.iterations, self._ahead.flights[0]
        self.counters.plans += n
        self.counters.acks += n
        seen = Observation(
            event.ended_unix_s, flight.shape, flight.predicted_s, event.exec_s / n, iterations=n
        )
        self._ahead.leap(n, event.ended_unix_s, self._profile)
        self._planned.leapt(n)
        self._last_end_unix_s = event.ended_unix_s
        self._policy.observe(seen)

    # ------------------------------------------------------------ rows

    def _admit_row(
        self,
        slot: int,
        offer: Offer,
        now_unix_s: float,
        *,
        computed_tokens: int = 0,
        generated_tokens: int,
        draft_tokens: int = 0,
    ) -> None:
        self._table.add(
            slot,
            offer,
            computed_tokens=computed_tokens,
            generated_tokens=generated_tokens,
            draft_tokens=draft_tokens,
        )
        self._slots.assign(offer, slot)
        self._fairness.seat(slot, self._table, now_unix_s)
        leaves_unix_s = float(self._table.leaves_unix_s()[self._table.row_of[slot]])
        self._next_expiry_unix_s = min(self._next_expiry_unix_s, leaves_unix_s)
        if generated_tokens >= offer.max_tokens:
            self._table.leave(slot)
        self._changed()

    def _remove(self, slot: int, why: str, ended: list[Ended]) -> None:
        table = self._table
        row = int(table.row_of[slot])
        generated = int(table.generated_tokens[row]) - self._ahead.overcounted(slot)
        computed = int(table.computed_tokens[row])
        offer = table.remove(slot)
        self._fairness.leave(
            offer,
            prompt_tokens=computed,
            output_tokens=generated - offer.generated_tokens,
        )
        self._slots.forget(offer)
        self._slots.retire(slot, self._seq - 1)
        self._expired.discard(slot)
        self._ahead.releasing.discard(slot)
        if why in (FinishReason.STOP, FinishReason.LENGTH):
            ended.append(Ended(offer.application, offer.prompt_tokens, offer.max_tokens, generated))

    # ------------------------------------------------------------ time

    def _on_time(self, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        if self._ahead.flights and now_unix_s >= self._overdue_unix_s():
            self._lose_sync(f"ack {self._ahead.flights[0].seq} is overdue", actions)
            return
        if now_unix_s >= self._next_expiry_unix_s:
            self._expire(now_unix_s)
        if now_unix_s >= self._desk.decide_unix_s:
            self._decide(now_unix_s, actions)
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
        flights = self._ahead.flights
        return flights[-1].end_unix_s - self._lead.seconds if flights else -math.inf

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
        orders = write_orders(
            choice, self._expired, table, self._ahead, hand_back=self._set.hand_back
        )
        self._expired.clear()
        if orders.relegated:  # they may have waited too long for a first token already
            leaves_unix_s = float(table.leaves_unix_s().min(initial=math.inf))
            self._next_expiry_unix_s = min(self._next_expiry_unix_s, leaves_unix_s)
        waits = math.isfinite(choice.again_unix_s)
        if waits and not len(choice.slots):
            self._again_unix_s = max(choice.again_unix_s, now_unix_s + AGAIN_S)
        entries = self._ahead.entries(choice)
        if entries.cut:
            self._planned.forget()
        nothing_runs = not len(entries.slots) and not self._ahead.flights and table.live
        silent = not (orders.released or orders.preempted or orders.relegated or waits)
        if nothing_runs and (len(choice.slots) or silent):
            self._make_room(int(choice.slots[0]) if len(choice.slots) else None, orders)
        if not (
            len(entries.slots)
            or orders.released
            or orders.preempted
            or orders.relegated
            or orders.promoted
        ):
            return None
        flight = self._ahead.launch(self._seq, entries, start, self._profile)
        return self._send(flight, orders)

    def _make_room(self, first: int | None, orders: Orders) -> None:
        """The last resort: a request gives its KV up, so that another gets to run."""
        victim = gives_way(self._table, first)
        if victim is not None:
            self.counters.forced_preemptions += 1
            orders.preempted.append(victim)
            self._ahead.preempt(victim)
            self._planned.forget()

    def _view(
        self, start_unix_s: float, offers: Sequence[Offer] = ()
    ) -> tuple[View, Sequence[Offer]]:
        """The view, and these offers, as the policy sees them."""
        assert self._announce is not None
        self._ahead.date_newest_tokens()
        view = self._table.view(
            start_unix_s,
            self._profile.now,
            self._draft.now,
            self._announce.pool,
            self._accepted_shares,
            self._announce.longest_chain,
        )
        if not self._fairness.contested:
            return view, offers
        view.importance, of_offers = self._fairness.importance(self._table, offers)
        seen = [
            msgspec.structs.replace(offer, importance=importance)
            for offer, importance in zip(offers, of_offers, strict=True)
        ]
        return view, seen

    def _send(self, flight: InFlightPlan, orders: Orders) -> BatchPlan:
        assert self._announce is not None
        self._seq += 1
        self.counters.plans += 1
        released = orders.released
        return BatchPlan(
            replica=self._announce.replica,
            incarnation=self._announce.incarnation,
            epoch=self._epoch,
            sync=self._sync,
            seq=flight.seq,
            slots=flight.packed_slots,
            caps=pack(flight.caps),
            predicted_s=flight.predicted_s,
            decodes_s=self._decodes_s(flight.shape),
            drafts_s=flight.draft_s,
            released=pack([slot for slot, _ in released]) if released else b"",
            released_why=[why for _, why in released],
            preempted=pack(orders.preempted) if orders.preempted else b"",
            relegated=pack(orders.relegated) if orders.relegated else b"",
            promoted=pack(orders.promoted) if orders.promoted else b"",
            selection=flight.selection,
        )

    def _decodes_s(self, shape: BatchShape) -> float:
        """The seconds of a mixed batch's decodes alone; 0 for any other batch."""
        if not shape.prefills or not shape.decodes:
            return 0.0
        return self._profile.batch_s(
            BatchShape(decodes=shape.decodes, decode_context=shape.decode_context)
        )

    # ------------------------------------------------------------ what others see

    @property
    def idle(self) -> bool:
        """Nothing is held, promised or in flight."""
        return (
            not self._ahead.flights
            and not self._desk.gathered
            and not self._desk.reserved
            and self._table.used == 0
        )

    @property
    def synced(self) -> bool:
        return self._synced

    @property
    def residual(self) -> float:
        """The corrected profile's relative error, smoothed."""
        return self._profile.residual

    @property
    def bias(self) -> float:
        """(measured - predicted) / measured of late iterations taken together."""
        return self._profile.bias

    @property
    def gammas(self) -> tuple[float, float, float]:
        """measured / base profile as now used for decode-only, mixed and prefill-only
        iterations.
        """
        return self._profile.gammas

    @property
    def lead_s(self) -> float:
        """The lead with which the next plan leaves."""
        return self._lead.seconds

    @property
    def best_effort(self) -> int:
        """The best-effort requests that the replica holds."""
        table = self._table
        return int(np.count_nonzero(table.best_effort[: table.live]))

    def slacks_s(self, now_unix_s: float) -> list[float]:
        """The slack of each standard request with a deadline: that of its next token that no plan
        has, minus now.
        """
        table = self._table
        due = table.next_due_unix_s[: table.live]
        owed = ~table.best_effort[: table.live] & np.isfinite(due)
        slacks: list[float] = (due[owed] - now_unix_s).tolist()
        return slacks

    @property
    def repeats(self) -> int:
        """The number of iterations, the one in flight included, that may run its plan over and
        over: 1 unless its choice stays right that long and no request reaches its maximum before
        the last. A driver of virtual time may leap them.
        """
        return self._planned.repeats(self._table, self._ahead.flights)

    def digest(self, *, planner: str, now_unix_s: float) -> Digest | None:
        """The digest for routers; None before the first resync."""
        if self._announce is None or not self._synced:
            return None
        digest = digest_of(
            self._announce,
            self._table,
            self._desk.promised,
            self._profile,
            planner=planner,
            now_unix_s=now_unix_s,
        )
        roomy = self._table.kv_free_blocks() * 4 > digest.kv_blocks
        waiting = best_effort_waiting(self._table)
        surplus = digest.waiting == 0 and waiting < self._set.best_effort_waiting and roomy
        return msgspec.structs.replace(digest, free_slots=self._slots.free, surplus=surplus)

    def roster(self, slots: Iterable[int]) -> list[RosterEntry]:
        """The requests in these slots, or in all where none is named."""
        return roster(self._table, slots)

    def loads(self) -> tuple[Neighbour, ...]:
        """Those whose standard prefills come before that of a request that is declined now."""
        return loads_of(self._table, self._desk.promised, self._profile)

    def check(self) -> None:
        """Raises AssertionError unless the table, the slots and the plans in flight agree."""
        self._table.check()
        self._slots.check(
            held=set(self._table.offers),
            reserved=set(self._desk.reserved),
            count=self._table.capacity if self._synced else None,
        )
        assert len(self._ahead.flights) <= self._set.depth
        for flight in self._ahead.flights:
            named = flight.slots.tolist()
            assert len(named) == len(set(named)), "a request twice in a plan"
