"""ReplicaCore: the brain of one replica. Books, plans in flight, reconciliation with acks; the
policy decides within it.

Sans-IO: `handle(event, now_unix_s=...) -> actions`; `wake_at_unix_s()` says when it next wants a
Tick. One implementation for all policies, live and simulated. docs/architecture.md draws the
pipeline.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import assert_never

import msgspec
import numpy as np

from shared.columns import pack, unpack
from shared.core.ack_columns import well_formed
from shared.core.books import Books
from shared.core.course import Course
from shared.core.digest import best_effort_waiting, digest_of
from shared.core.flight import Flight
from shared.core.lead import Lead
from shared.core.prediction import Prediction
from shared.core.reconciliation import Reconciliation
from shared.core.replica_events import (
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
    SendHold,
    SendPlan,
    Synced,
    WorkerGone,
)
from shared.core.tick import Tick
from shared.perf.iteration_time import Profile
from shared.perf.online import Corrected
from shared.perf.shape import BatchShape
from shared.policy.seam import Choice, Ended, Observation, Phase, Policy, View
from shared.schemas import (
    Announce,
    BatchPlan,
    Digest,
    Hold,
    HoldAccepted,
    HoldDeclined,
    HoldInDoubt,
    Offer,
    OfferAccepted,
    OfferAnswer,
    OfferDeclined,
    OfferInDoubt,
    OfferNotReady,
    PlanAck,
)
from shared.vocabulary import FinishReason, RequestKey

# ---------------------------------------------------------------- settings


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How plans travel. depth 1 and lead 0 reproduce the papers' zero-latency loop."""

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
    """What the shell exports."""

    plans: int = 0
    acks: int = 0
    resyncs: int = 0
    mispredicted_entries: int = 0
    forced_preemptions: int = 0
    relegated: int = 0
    exec_s: float = 0.0
    idle_s: float = 0.0


@dataclass(slots=True)
class _Reservation:
    offer: Offer
    slot: int
    waiting: int = field(default=1)
    over: bool = False  # an ack told its end before the answer to its hold came


DECLINES = 4096  # remembered; a second copy of an offer comes within seconds, if ever
AGAIN_S = 0.0005  # a policy that waits is not asked more often than this


# ---------------------------------------------------------------- the core


class ReplicaCore:
    """Plans for one replica under one lease epoch."""

    def __init__(
        self,
        policy: Policy,
        profile: Profile,
        *,
        epoch: int,
        settings: ReplicaSettings | None = None,
        draft: Profile | None = None,
    ) -> None:
        self._policy = policy
        self._profile = Corrected(profile)
        self._draft = draft
        self._epoch = epoch
        self._set = settings or ReplicaSettings()
        self._announce: Announce | None = None
        self._books = Books(slots=1, kv_blocks=0, block_tokens=1, context_tokens=1)
        self._ahead = Prediction(self._books, draft)
        self._reconciliation = Reconciliation(self._books, self._ahead)
        self._synced = False
        self._sync = 0
        self._seq = 0  # next to send
        self._acked_seq = 0
        self._ack_seq = 0
        self._free: list[int] = []  # heap: lowest slot first, so rows stay dense
        self._quarantine: deque[tuple[int, int]] = deque()  # (slot, last seq sent when it ended)
        # offers that wait for others, and how often they came
        self._gathered: dict[tuple[RequestKey, int], tuple[Offer, int]] = {}
        self._decide_unix_s = math.inf
        self._reserved: dict[int, _Reservation] = {}
        self._declined: OrderedDict[tuple[RequestKey, int], OfferAnswer] = OrderedDict()
        self._slot_of: dict[tuple[RequestKey, int], int] = {}
        self._course = Course()
        # when the policy wants to be asked although nothing has happened
        self._again_unix_s = math.inf
        self._idle = True  # the policy had nothing to run and nothing has happened since
        self._last_end_unix_s = -math.inf  # of the newest acked iteration
        self._lead = Lead(self._set.lead_s, self._set.lead_max_s)
        self._next_expiry_unix_s = math.inf
        self._expired: set[int] = set()
        self.counters = Counters()

    # ------------------------------------------------------------ the driver's side

    @property
    def idle(self) -> bool:
        """Nothing is held, promised or in flight."""
        return (
            not self._ahead.flights
            and not self._gathered
            and not self._reserved
            and self._books.used == 0
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
    def repeats(self) -> int:
        """How many iterations, the one in flight included, may run its plan over and over: 1 unless
        its choice stays right that long and nobody reaches its maximum before the last. A driver of
        virtual time may leap them.
        """
        return self._course.repeats(self._books, self._ahead.flights)

    def wake_at_unix_s(self) -> float | None:
        if not self._synced:
            return None
        wake = min(self._next_expiry_unix_s, self._again_unix_s, self._decide_unix_s)
        if self._ahead.flights:
            wake = min(wake, self._overdue_unix_s())
        if not self._idle and len(self._ahead.flights) < self._set.depth:
            wake = min(wake, self._plan_at_unix_s())
        return None if wake == math.inf else wake

    def handle(self, event: ReplicaEvent, *, now_unix_s: float) -> list[ReplicaAction]:
        """Actions, in order. Timers that are due fire after the event's own changes, once.

        After a Leapt they wait for the event that made the driver look. After a HoldDone they wait
        for the next event, or the wake-up that is due at once: someone waits for its answer, and a
        plan takes longer than that.
        """
        actions: list[ReplicaAction] = []
        match event:
            case Synced():
                self._on_synced(event, now_unix_s, actions)
            case Offered():
                self._on_offered(event.offers, now_unix_s, actions)
            case HoldDone():
                self._on_hold_done(event, actions)
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
        if self._synced and not isinstance(event, HoldDone | Leapt):
            self._on_time(now_unix_s, actions)
        return actions

    # ------------------------------------------------------------ events

    def _on_synced(self, event: Synced, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        facts = event.announce
        held = {(r.offer.key, r.offer.attempt): r for r in self._reserved.values()}
        self._announce = facts
        self._books = Books(
            slots=facts.max_slots,
            kv_blocks=facts.kv_blocks,
            block_tokens=facts.block_tokens,
            context_tokens=facts.context_tokens,
        )
        self._ahead = Prediction(self._books, self._draft)
        self._reconciliation = Reconciliation(self._books, self._ahead)
        self._course.forget()
        self._quarantine.clear()
        self._slot_of.clear()
        self._expired.clear()
        self._next_expiry_unix_s = math.inf
        self._sync = event.sync
        self._seq = event.next_seq
        self._acked_seq = event.next_seq - 1
        self._ack_seq = event.ack_seq
        taken = set(self._reserved)
        self._slot_of.update(
            {(r.offer.key, r.offer.attempt): r.slot for r in self._reserved.values()}
        )
        for entry in event.entries:
            taken.add(entry.slot)
            reservation = held.get((entry.offer.key, entry.offer.attempt))
            if reservation is not None and reservation.slot == entry.slot:
                continue  # its HoldDone is on the way
            self._admit_row(
                entry.slot,
                entry.offer,
                entry.computed_tokens,
                entry.generated_tokens,
                entry.draft_tokens,
            )
        self._free = [s for s in range(facts.max_slots) if s not in taken]
        heapify(self._free)
        self._synced = True
        self._idle = False
        self._last_end_unix_s = now_unix_s

    def _on_offered(
        self, offers: Sequence[Offer], now_unix_s: float, actions: list[ReplicaAction]
    ) -> None:
        gathered = self._gathered
        for offer in offers:
            name = (offer.key, offer.attempt)
            slot = self._slot_of.get(name)
            if name in self._declined:
                actions.append(Answer(offer.key, offer.attempt, self._declined[name]))
            elif slot is not None and slot in self._reserved:
                self._reserved[slot].waiting += 1
            elif slot is not None:
                actions.append(Answer(offer.key, offer.attempt, OfferAccepted(reason="held")))
            elif not self._synced or self._announce is None or self._announce.draining:
                self._decline(offer, OfferNotReady(reason="not ready"), actions)
            elif offer.prompt_tokens + offer.generated_tokens >= self._announce.context_tokens:
                self._decline(offer, OfferDeclined(reason="prompt exceeds the context"), actions)
            elif (
                -(-(offer.prompt_tokens + offer.generated_tokens + 1) // self._books.block_tokens)
                > self._books.kv_blocks
            ):
                self._decline(offer, OfferDeclined(reason="prompt exceeds the KV cache"), actions)
            else:
                gathered[name] = (offer, gathered[name][1] + 1 if name in gathered else 1)
        if not gathered:
            return
        declared = self._policy.declared
        self._decide_unix_s = min(self._decide_unix_s, now_unix_s + declared.gather_s)
        if now_unix_s >= self._decide_unix_s or len(gathered) >= declared.gather_offers:
            self._decide(now_unix_s, actions)

    def _decide(self, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        """Answer the gathered offers together."""
        gathered, self._gathered, self._decide_unix_s = self._gathered, {}, math.inf
        fresh = [offer for offer, _ in gathered.values()]
        promised = [r.offer for r in self._reserved.values()]
        view = self._view(self._start_unix_s(now_unix_s), promised)
        for (offer, asked), admission in zip(
            gathered.values(), self._policy.admit(view, fresh), strict=True
        ):
            if not admission.accepted:
                answer = OfferDeclined(reason=admission.reason, earliest_s=admission.earliest_s)
                self._decline(offer, answer, actions, asked)
            elif not self._free:
                self._decline(offer, OfferDeclined(reason="no free slot"), actions, asked)
            else:
                slot = heappop(self._free)
                self._reserved[slot] = _Reservation(offer, slot, asked)
                self._slot_of[offer.key, offer.attempt] = slot
                hold = Hold(
                    epoch=self._epoch,
                    sync=self._sync,
                    slot=slot,
                    key=offer.key,
                    attempt=offer.attempt,
                    body_key=offer.body_key,
                )
                actions.append(SendHold(hold))

    def _on_hold_done(self, event: HoldDone, actions: list[ReplicaAction]) -> None:
        reservation = self._reserved.pop(event.slot, None)
        if reservation is None:
            return
        offer, waiting = reservation.offer, reservation.waiting
        match event.answer:
            case HoldAccepted():
                if reservation.over:
                    self._free_reserved(event.slot, offer)
                elif not self._books.holds(event.slot):
                    self._admit_row(event.slot, offer, 0, offer.generated_tokens, 0)
                actions.extend([Answer(offer.key, offer.attempt, OfferAccepted())] * waiting)
            case HoldDeclined(reason=reason):
                self._free_reserved(event.slot, offer)
                self._decline(offer, OfferDeclined(reason=reason), actions, waiting)
            case WorkerGone():
                self._free_reserved(event.slot, offer)
                self._decline(offer, OfferNotReady(reason="the worker is gone"), actions, waiting)
            case HoldInDoubt(reason=reason):
                self._slot_of.pop((offer.key, offer.attempt), None)
                self._lose_sync(f"hold of slot {event.slot}: {reason}", actions)
                self._decline(offer, OfferInDoubt(reason=reason), actions, waiting)
            case _:
                assert_never(event.answer)

    def _free_reserved(self, slot: int, offer: Offer) -> None:
        self._slot_of.pop((offer.key, offer.attempt), None)
        if self._synced:
            heappush(self._free, slot)

    def _decline(
        self,
        offer: Offer,
        answer: OfferDeclined | OfferNotReady | OfferInDoubt,
        actions: list[ReplicaAction],
        times: int = 1,
    ) -> None:
        """Once declined, an attempt stays declined: a second copy of its offer must not be accepted
        behind the asker's back.
        """
        self._declined[offer.key, offer.attempt] = answer
        if len(self._declined) > DECLINES:
            self._declined.popitem(last=False)
        actions.extend([Answer(offer.key, offer.attempt, answer)] * times)

    def _on_acked(self, ack: PlanAck, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        facts = self._announce
        if not self._synced or facts is None:
            return
        if ack.incarnation != facts.incarnation:
            self._lose_sync("another incarnation", actions)
            return
        if not well_formed(ack, self._books.capacity):
            self._lose_sync("an ack whose columns do not fit", actions)
            return
        if ack.ack_seq <= self._ack_seq:
            return  # doubled, or part of what the resync told
        if ack.ack_seq != self._ack_seq + 1:
            self._lose_sync(f"ack {ack.ack_seq} came after {self._ack_seq}", actions)
            return
        self._ack_seq = ack.ack_seq
        ended: list[Ended] = []
        flight: Flight | None = None
        shape, drafts = BatchShape(), None
        if ack.plan_seq:
            if not self._ahead.flights or (ack.epoch, ack.plan_seq) != (
                self._epoch,
                self._ahead.flights[0].seq,
            ):
                self._lose_sync(
                    f"ack of plan {ack.plan_seq}, epoch {ack.epoch} was not expected", actions
                )
                return
            flight = self._ahead.flights.popleft()
            self._acked_seq = flight.seq
            shape, drafts, missed = self._reconciliation.reconcile(flight, ack)
            if missed:
                self.counters.mispredicted_entries += missed
                self._changed()
            self._last_end_unix_s = now_unix_s - min(max(now_unix_s - ack.ended_unix_s, 0.0), 0.005)
            self._ahead.retime(self._last_end_unix_s, self._profile)
        for slot, thinking_tokens in zip(
            unpack(ack.answering).tolist(), unpack(ack.thinking_tokens).tolist(), strict=True
        ):
            if self._books.holds(slot):
                self._books.answers(slot, thinking_tokens)
                # another pace: what was chosen for the old one may not be right for it
                self._changed()
        for slot, why in ack.ended:
            if self._books.holds(slot):
                self._remove(slot, why, ended)
            elif slot in self._reserved:
                self._reserved[slot].over = True
        if any(self._books.holds(slot) for slot in unpack(ack.skipped).tolist()):
            self._lose_sync("the worker does not have what was planned", actions)
            return
        self._release_quarantine()
        if flight is not None and shape.tokens:
            self.counters.acks += 1
            self.counters.exec_s += ack.exec_s
            self.counters.idle_s += ack.idle_s
            self._profile.observe(shape, ack.exec_s - flight.draft_s)
            if flight.follows:
                self._lead.observe(ack.idle_s, ack.exec_s)
            self._policy.observe(
                Observation(now_unix_s, shape, flight.predicted_s, ack.exec_s, ended, drafts)
            )
        elif ended:
            self._policy.observe(Observation(now_unix_s, BatchShape(), 0.0, 0.0, ended))
        if ended or ack.ended:
            self._changed()
        self._idle = False

    def _on_leapt(self, event: Leapt) -> None:
        """Books and policy as after so many acks; the profile learns from the iteration that is
        acked.
        """
        n, flight = event.iterations, self._ahead.flights[0]
        self.counters.plans += n
        self.counters.acks += n
        self.counters.exec_s += event.exec_s
        seen = Observation(
            event.ended_unix_s, flight.shape, flight.predicted_s, event.exec_s / n, iterations=n
        )
        self._ahead.leap(n, event.ended_unix_s, self._profile)
        self._course.leapt(n)
        self._last_end_unix_s = event.ended_unix_s
        self._policy.observe(seen)

    def _on_heartbeat(self, announce: Announce, actions: list[ReplicaAction]) -> None:
        """An ack that the last heartbeat already told of and that has not come by this one is
        lost.
        """
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

    # ------------------------------------------------------------ time

    def _on_time(self, now_unix_s: float, actions: list[ReplicaAction]) -> None:
        if self._ahead.flights and now_unix_s >= self._overdue_unix_s():
            self._lose_sync(f"ack {self._ahead.flights[0].seq} is overdue", actions)
            return
        if now_unix_s >= self._next_expiry_unix_s:
            self._expire(now_unix_s)
        if now_unix_s >= self._decide_unix_s:
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
        """When the next plan is predicted to begin."""
        return (
            max(self._ahead.flights[-1].end_unix_s, now_unix_s)
            if self._ahead.flights
            else now_unix_s
        )

    def _plan_at_unix_s(self) -> float:
        """As late as is safe: a measured lead before the predicted end of what runs. At once if
        nothing runs.
        """
        return (
            self._ahead.flights[-1].end_unix_s - self._lead.seconds
            if self._ahead.flights
            else -math.inf
        )

    def _overdue_unix_s(self) -> float:
        first = self._ahead.flights[0]
        return first.end_unix_s + self._set.overdue_s + 5 * first.predicted_s

    def _expire(self, now_unix_s: float) -> None:
        books = self._books
        late = np.flatnonzero(books.expires_unix_s[: books.live] <= now_unix_s)
        self._expired.update(int(books.slot[r]) for r in late)
        later = books.expires_unix_s[: books.live]
        later = later[later > now_unix_s]
        self._next_expiry_unix_s = float(later.min()) if len(later) else math.inf
        if len(late):
            self._changed()

    # ------------------------------------------------------------ planning

    def _changed(self) -> None:
        """Something other than progress happened: ask the policy afresh."""
        self._course.forget()
        self._again_unix_s = math.inf
        self._idle = False

    def _plan(self, now_unix_s: float) -> BatchPlan | None:
        """The next plan, its effects written into the books; None if there is nothing to say."""
        books, start = self._books, self._start_unix_s(now_unix_s)
        choice = self._course.next(books, lambda: self._policy.plan(self._view(start)))
        released = [(slot, FinishReason.EXPIRED.value) for slot in sorted(self._expired)]
        self._expired.clear()
        relegated: list[int] = []
        for slot in choice.relegate:
            row = books.row_of[slot]
            self.counters.relegated += 1
            begun = (
                books.phase[row] != Phase.WAITING
                or books.generated_tokens[row] > books.offers[slot].generated_tokens
            )
            if self._set.hand_back and not begun:
                released.append((slot, "relegated"))
            else:
                relegated.append(slot)
            books.best_effort[row] = True
        for slot in choice.promote:
            books.best_effort[books.row_of[slot]] = False
        assert self._policy.declared.drops or all(
            why != FinishReason.DROPPED for _, why in choice.release
        ), "an undeclared drop"
        released += choice.release
        for slot, _ in released:
            self._ahead.release(slot)
        preempted = list(choice.preempt)
        for slot in preempted:
            self._ahead.preempt(slot)
        if not len(choice.slots) and math.isfinite(choice.again_unix_s):
            self._again_unix_s = max(choice.again_unix_s, now_unix_s + AGAIN_S)
        entries = self._ahead.entries(choice)
        if entries.cut:
            self._course.forget()
        nothing_said = not (
            released or preempted or relegated or math.isfinite(choice.again_unix_s)
        )
        if (
            not len(entries.slots)
            and not self._ahead.flights
            and books.live
            and (len(choice.slots) or nothing_said)
        ):
            victim = self._last_resort(int(choice.slots[0]) if len(choice.slots) else None)
            if victim is not None:
                preempted.append(victim)
                self._ahead.preempt(victim)
                self._course.forget()
        if not (len(entries.slots) or released or preempted or relegated or choice.promote):
            return None
        flight = self._ahead.launch(self._seq, entries, start, self._profile)
        return self._send(flight, choice, released, preempted, relegated)

    def _view(self, start_unix_s: float, promised: Sequence[Offer] = ()) -> View:
        assert self._announce is not None
        return self._books.view(
            start_unix_s, self._profile, self._draft, promised, self._announce.pool
        )

    def _last_resort(self, first: int | None) -> int | None:
        """KV is full and no entry fits, not even the first: who gives way to it is best-effort,
        else the latest come.
        """
        books = self._books
        holding = np.flatnonzero(
            (books.kv_held_blocks[: books.live] > 0)
            & (books.slot[: books.live] != (-1 if first is None else first))
        )
        if len(holding) < (2 if first is None else 1):
            return None
        self.counters.forced_preemptions += 1
        order = np.lexsort(
            (books.slot[holding], books.arrived_unix_s[holding], books.best_effort[holding])
        )
        return int(books.slot[holding[order[-1]]])

    def _send(
        self,
        flight: Flight,
        choice: Choice,
        released: Sequence[tuple[int, str]],
        preempted: Sequence[int],
        relegated: Sequence[int],
    ) -> BatchPlan:
        assert self._announce is not None
        self._seq += 1
        self.counters.plans += 1
        return BatchPlan(
            replica=self._announce.replica,
            incarnation=self._announce.incarnation,
            epoch=self._epoch,
            sync=self._sync,
            seq=flight.seq,
            slots=flight.packed_slots,
            caps=pack(flight.caps),
            predicted_s=flight.predicted_s,
            released=pack([s for s, _ in released]) if released else b"",
            released_why=[w for _, w in released],
            preempted=pack(preempted) if preempted else b"",
            relegated=pack(relegated) if relegated else b"",
            promoted=pack(choice.promote) if choice.promote else b"",
            selection=flight.selection,
        )

    # ------------------------------------------------------------ slots

    def _remove(self, slot: int, why: str, ended: list[Ended]) -> None:
        books = self._books
        row = int(books.row_of[slot])
        generated = int(books.generated_tokens[row]) - self._ahead.overcounted(slot)
        offer = books.remove(slot)
        self._slot_of.pop((offer.key, offer.attempt), None)
        self._expired.discard(slot)
        self._ahead.releasing.discard(slot)
        self._quarantine.append((slot, self._seq - 1))
        if why in (FinishReason.STOP, FinishReason.LENGTH):
            ended.append(Ended(offer.application, offer.prompt_tokens, offer.max_tokens, generated))

    def _release_quarantine(self) -> None:
        """A slot is used again only when no plan that may name it is still to run."""
        while self._quarantine and self._quarantine[0][1] <= self._acked_seq:
            heappush(self._free, self._quarantine.popleft()[0])

    def _admit_row(
        self,
        slot: int,
        offer: Offer,
        computed_tokens: int,
        generated_tokens: int,
        draft_tokens: int,
    ) -> None:
        self._books.add(
            slot,
            offer,
            computed_tokens=computed_tokens,
            generated_tokens=generated_tokens,
            draft_tokens=draft_tokens,
        )
        self._slot_of[offer.key, offer.attempt] = slot
        self._next_expiry_unix_s = min(self._next_expiry_unix_s, offer.expires_unix_s)
        if generated_tokens >= offer.max_tokens:
            self._books.leave(slot)
        self._changed()

    # ------------------------------------------------------------ for others to see

    def digest(self, *, planner: str, now_unix_s: float) -> Digest | None:
        """What routers may know; None before the first resync."""
        if self._announce is None or not self._synced:
            return None
        reserved = [r.offer for r in self._reserved.values()]
        told = digest_of(
            self._announce,
            self._books,
            reserved,
            self._profile,
            planner=planner,
            now_unix_s=now_unix_s,
        )
        roomy = self._books.kv_free_blocks() * 4 > told.kv_blocks
        waiting = best_effort_waiting(self._books)
        surplus = told.waiting == 0 and waiting < self._set.best_effort_waiting and roomy
        return msgspec.structs.replace(told, free_slots=len(self._free), surplus=surplus)

    def check(self) -> None:
        """Raises AssertionError unless the books balance (DESIGN: what always holds)."""
        self._books.check()
        free, quarantined = set(self._free), {s for s, _ in self._quarantine}
        assert not free & set(self._books.offers), "a free slot is held"
        assert not free & set(self._reserved), "a free slot is reserved"
        assert not free & quarantined, "a free slot is in quarantine"
        if self._synced:
            known = free | quarantined | set(self._books.offers) | set(self._reserved)
            assert len(known) == self._books.capacity, "a slot is lost"
        assert len(self._ahead.flights) <= self._set.depth
        for flight in self._ahead.flights:
            named = flight.slots.tolist()
            assert len(named) == len(set(named)), "a request twice in a plan"
