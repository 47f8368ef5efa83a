"""WorkerCore: the requests that one worker holds, and its next iteration. Sans-IO: the shell moves
messages and runs the engine.

Nothing here waits. `begin` turns the next plan into exact work. `finish` turns what the engine did
into the ack, the deltas that may leave once that ack is stored, and the attempts that are over.
Cancels and withdrawals take effect between iterations.
"""

from collections.abc import Sequence
from itertools import islice

from services.worker.core.ack_builder import AckBuilder
from services.worker.core.engine_time import WorkerCounters, spent_in
from services.worker.core.holdings import EVERY_ATTEMPT, Holdings, Tombstones
from services.worker.core.plan_queue import PlanQueue
from services.worker.core.snapshot_pages import pages
from shared.columns import unpack_list
from shared.core.record.record import ENGINE_DIED, FINAL
from shared.core.record.record import held as held_by_record
from shared.core.record.time_accounting import Chunk, TimeAccounting
from shared.core.worker.draft_yields import DraftYields
from shared.core.worker.held_request import HeldRequest
from shared.core.worker.step import Finished, Load, Outgoing, Ran, Step, Timing, TurnDone, Work
from shared.policy.need import needed_tokens, paces_of
from shared.policy.speculation import along
from shared.prefix import Changed
from shared.request_timeline import Happened
from shared.schemas import (
    AttemptOver,
    BatchPlan,
    Body,
    DraftYield,
    Hold,
    HoldAnswer,
    OfferAccepted,
    OfferDeclined,
    OfferInDoubt,
    PlanRefused,
    Record,
    ResyncEntry,
    Sampling,
    Snapshot,
)
from shared.vocabulary import HANDED_OVER, FinishReason, ReplicaId, RequestKey, ServiceClass

NO_BODY = Body(prompt=b"", sampling=Sampling())
KEPT_LIMIT = 1 << 15  # hashes of prefixes in a report: 256 KiB


class WorkerCore:
    """One life (incarnation) of one worker."""

    def __init__(
        self,
        replica: ReplicaId,
        incarnation: str,
        *,
        kv_blocks: int,
        block_tokens: int,
        context_tokens: int,
        max_slots: int,
        eos_token_ids: frozenset[int] = frozenset(),
        # the token; None: this model has none, and its whole output is response
        end_of_thinking: int | None = None,
        kv_address: str = "",  # where other workers fetch KV; empty: it stays here
    ) -> None:
        self.replica = replica
        self.incarnation = incarnation
        self.counters = WorkerCounters()
        self._context_tokens = context_tokens
        self._max_slots = max_slots
        self._eos_token_ids = eos_token_ids
        self._end_of_thinking, self._kv_address = end_of_thinking, kv_address
        self._plans = PlanQueue(incarnation, max_slots)
        self._holdings = Holdings(kv_blocks=kv_blocks, block_tokens=block_tokens)
        self._accounting = TimeAccounting(replica)
        self._draft_yields = DraftYields()
        self._tombstones = Tombstones()
        self._unsettled: dict[tuple[RequestKey, int], AttemptOver] = {}
        self._running: Step | None = None
        self.ack_seq = 0  # of the newest ack
        # the hashes of prefixes in the engine's cache, the newest last: in the host's memory?
        self._kept: dict[int, bool] = {}

    # ------------------------------------------------------------ snapshots for others

    @property
    def epoch(self) -> int:
        return self._plans.epoch

    @property
    def next_seq(self) -> int:
        return self._plans.next_seq

    @property
    def waiting_plans(self) -> int:
        return len(self._plans)

    @property
    def running(self) -> bool:
        return self._running is not None

    @property
    def held(self) -> int:
        return len(self._holdings)

    @property
    def closing(self) -> int:
        """The number of requests that will be over at the next boundary."""
        return self._holdings.ending

    @property
    def free_blocks(self) -> int:
        return self._holdings.free_blocks

    @property
    def shared_blocks(self) -> int:
        """KV blocks that are saved because requests share them, at the least."""
        return self._holdings.shared_blocks

    @property
    def draft_shared_blocks(self) -> int:
        """As `shared_blocks`, in the draft model's own KV."""
        return self._holdings.draft_shared_blocks

    @property
    def prefixes(self) -> Changed:
        """Where the engine's cache has prefixes: the newest KEPT_LIMIT of them."""
        newest = list(islice(self._kept.items(), max(0, len(self._kept) - KEPT_LIMIT), None))
        kept = [each for each, moved in newest if not moved]
        return Changed(kept, [each for each, moved in newest if moved])

    @property
    def draft_yields(self) -> list[DraftYield]:
        """The acceptance of drafts, as this worker has learned it."""
        return self._draft_yields.rows()

    @property
    def unsettled(self) -> list[AttemptOver]:
        return list(self._unsettled.values())

    def entries(self) -> list[ResyncEntry]:
        """Every request held, as it is between iterations."""
        return [request.resync_entry() for request in self._holdings]

    def snapshots(self) -> list[Snapshot]:
        """All that must outlive a trim of the log, in pages. Called right after an ack was built,
        so that no ack is half reported.
        """
        entries = [
            request.snapshot_entry(self._accounting.timeline(request.slot))
            for request in self._holdings.reported()
        ]
        return pages(self.incarnation, entries, self.unsettled)

    def check(self) -> None:
        """Raises AssertionError unless the books balance."""
        self._holdings.check()

    # ------------------------------------------------------------ the planner's side

    def resync(self, epoch: int, sync: int) -> bool:
        """Drop the plans not begun: a planner takes over or resyncs. False: its lease is stale."""
        return self._plans.resync(epoch, sync)

    def plan(self, plan: BatchPlan) -> PlanRefused | None:
        """Queue a plan, or refuse it with the reason."""
        return self._plans.accept(plan)

    def hold(
        self,
        hold: Hold,
        record: Record,
        body: Body | str,
        refused: str = "",
        *,
        now_unix_s: float,
        kv_tokens: int = 0,
    ) -> HoldAnswer:
        """Take a request in. `record` was read from the store after the hold came. A text as `body`
        says why the body cannot be read: the request fails with it at the next boundary. `refused`
        says why the engine never takes the request, which then ends there as invalid. `kv_tokens`
        of it were fetched.
        """
        answer = self._answer(hold, record)
        if answer is not None:
            return answer
        request = HeldRequest.begin(
            hold.slot,
            record,
            NO_BODY if isinstance(body, str) else body,
            eos_token_ids=self._eos_token_ids,
            end_of_thinking=self._end_of_thinking,
            keep_s=hold.keep_s,
            kv_tokens=kv_tokens,
        )
        held = self._holdings.add(request, now_unix_s)
        self._accounting.held(held, record.resume.diary.waited(record.arrived_unix_s, now_unix_s))
        if isinstance(body, str):
            request.message = body
            self._holdings.end_later(request, FinishReason.FAILED)
        elif refused:
            request.message = refused
            self._holdings.end_later(request, FinishReason.INVALID)
        return OfferAccepted(kv_tokens=kv_tokens)

    def decline(self, hold: Hold, reason: str) -> HoldAnswer:
        """Decline every copy of this hold. If one was taken in before, the answer says so."""
        if self.knows(hold.key, hold.attempt):
            return OfferAccepted()
        self._tombstones.bury(hold.key, hold.attempt)
        return OfferDeclined(reason=reason)

    def _answer(self, hold: Hold, record: Record) -> HoldAnswer | None:
        """The answer to a hold that is not to be taken in; None if it is."""
        held = self._holdings.of(hold.key)
        if held is not None and (held.record.attempt, held.slot) == (hold.attempt, hold.slot):
            return OfferAccepted(kv_tokens=held.kv_tokens)
        if (hold.key, hold.attempt) in self._unsettled:
            return OfferAccepted()  # it was taken in, and is over: this is a late copy
        if (hold.epoch, hold.sync) != (self._plans.epoch, self._plans.sync):
            # Another planner, or this one after a resync, may have asked for the same: only a
            # withdrawal brings certainty.
            return OfferInDoubt(reason="stale epoch")
        if self._tombstones.buried(hold.key, hold.attempt):
            return OfferDeclined(reason="withdrawn")
        if held is not None and hold.attempt < held.record.attempt:
            return OfferDeclined(reason="held under a later attempt")
        if held is not None:
            return OfferInDoubt(reason="held under another attempt")
        if held_by_record(record, self.replica, self.incarnation, attempt=hold.attempt) is None:
            return OfferDeclined(reason="the record says otherwise")
        if not 0 <= hold.slot < self._max_slots or hold.slot in self._holdings:
            return OfferInDoubt(reason="slot taken")
        return None

    # ------------------------------------------------------------ client's and admission's side

    def cancel(self, key: RequestKey, reason: str) -> None:
        """End a request at the next boundary; refuse any hold of it that comes later.

        A request that is not here gets no tombstone: its record says that it was cancelled, and a
        cancel of nothing would leave a tombstone for ever.
        """
        request = self._holdings.of(key)
        if request is not None:
            self._tombstones.bury(key, EVERY_ATTEMPT)
            request.message = reason
            self._holdings.end_later(request, FinishReason.CANCELLED)

    def withdraw(self, key: RequestKey, attempt: int) -> AttemptOver | bool:
        """The attempt's end, if it is over and not settled. True: the attempt is held, and will be
        over at the next boundary. False: it is not here, and will not be taken in.
        """
        over = self._unsettled.get((key, attempt))
        if over is not None:
            return over
        self._tombstones.bury(key, attempt)
        request = self._holdings.of(key)
        if request is None or request.record.attempt != attempt:
            return False
        self._holdings.end_later(request, "withdrawn")
        return True

    def knows(self, key: RequestKey, attempt: int) -> bool:
        """The attempt is held, or over and not settled."""
        request = self._holdings.of(key)
        return (key, attempt) in self._unsettled or (
            request is not None and request.record.attempt == attempt
        )

    def drain(self) -> None:
        """Give every request back, to go on elsewhere."""
        for request in self._holdings:
            self._holdings.end_later(request, "drained")

    def settled(self, key: RequestKey, attempt: int) -> None:
        """An admission has recorded the end of the attempt."""
        self._unsettled.pop((key, attempt), None)

    # ------------------------------------------------------------ before an iteration

    def begin(self, *, now_unix_s: float) -> Step | None:
        """The next plan as exact work, or a step that only releases; None if there is neither."""
        assert self._running is None
        plan = self._plans.begin()
        if plan is None:
            releases = self._holdings.take_releases()
            return Step(None, [], releases, [], [], None, []) if releases else None
        for slot, why in zip(unpack_list(plan.released), plan.released_why, strict=True):
            if slot in self._holdings:
                self._holdings.end_later(self._holdings[slot], why)
        preempts = [s for s in unpack_list(plan.preempted) if self._holdings.preempt(s)]
        # Their KV is free before this plan's entries run; their ends are reported with them.
        self._holdings.evict_ending()
        for request in self._named(plan.relegated):
            request.relegate()
        for request in self._named(plan.promoted):
            request.promote()
        self._running = self._step(plan, preempts, now_unix_s)
        return self._running

    def _step(self, plan: BatchPlan, preempts: Sequence[int], now_unix_s: float) -> Step:
        """The plan as exact work. Entries of requests that are gone or ending are skipped."""
        work: list[Work] = []
        loads: list[Load] = []
        skipped: list[int] = []
        kept: list[int] = []  # indices of the entries that run
        slots, caps, selection = unpack_list(plan.slots), unpack_list(plan.caps), plan.selection
        depths = [0] * len(slots) if selection is None else unpack_list(selection.depth)
        for entry, slot in enumerate(slots):
            request = self._holdings.get(slot)
            if request is None or self._holdings.is_ending(slot):
                skipped.append(slot)
                continue
            kept.append(entry)
            work.append(request.work(caps[entry], depths[entry], self._context_tokens))
            if not request.loaded:
                request.loaded = True
                loads.append(request.load())
        if selection is not None:
            work = self._with_needs(work, now_unix_s, selection.lasts_s)
            if skipped:
                selection = along(selection, kept)
        releases = self._holdings.take_releases()
        return Step(plan, preempts, releases, loads, work, selection, skipped)

    def _with_needs(self, work: list[Work], now_unix_s: float, lasts_s: float) -> list[Work]:
        """The work with the need of each request, from the tokens that the request has by now."""
        if not work or lasts_s <= 0.0:
            return work
        paces = paces_of(self._holdings[entry.slot].pace() for entry in work)
        needed = needed_tokens(paces, now_unix_s, lasts_s).tolist()
        return [entry._replace(needed=need) for entry, need in zip(work, needed, strict=True)]

    def _named(self, slots: bytes) -> list[HeldRequest]:
        """The requests of a plan's column that are still here."""
        return [self._holdings[slot] for slot in unpack_list(slots) if slot in self._holdings]

    # ------------------------------------------------------------ after an iteration

    def finish(
        self,
        ran: Ran,
        *,
        started_unix_s: float,
        ended_unix_s: float,
        idle_s: float,
        late_s: float = 0.0,
    ) -> Finished:
        """The running step is over. `late_s`: the part of the time since it could begin that is
        neither the engine's nor `idle_s`.
        """
        step = self._running
        assert step is not None and step.plan is not None
        self._running = None
        self.counters.exec_s += ran.exec_s
        self.counters.idle_s += idle_s
        self.counters.late_s += late_s
        self.counters.predicted_s += step.plan.predicted_s if step.work else 0.0
        spent = spent_in(step.plan, ended_unix_s, ran.exec_s, ran.drafted_s)
        timing = Timing(
            started_unix_s,
            ended_unix_s,
            ran.exec_s,
            idle_s,
            ran.outside_s,
            late_s,
            spent.decodes_s,
            spent.drafts_s,
            ran.drafted_s,
            ran.loaded_s,
        )
        shared = ran.shared_blocks, ran.draft_shared_blocks
        ack = AckBuilder(step, timing, *shared, ran.prefixes)
        for each in (*ran.prefixes.dropped, *ran.prefixes.kept):
            self._kept.pop(each, None)
        self._kept.update(dict.fromkeys(ran.prefixes.kept, False))
        self._kept.update(dict.fromkeys(ran.prefixes.moved, True))
        self._holdings.shared_blocks = ran.shared_blocks
        self._holdings.draft_shared_blocks = ran.draft_shared_blocks
        outgoing = self._class_changes(step.plan)
        chunks: list[Chunk] = []
        firsts: list[int] = []  # slots
        late: list[tuple[int, int, float]] = []  # slot, token, due
        ending: list[tuple[HeldRequest, TurnDone]] = []
        selection = step.selection
        depths = [0] * len(step.work) if selection is None else unpack_list(selection.depth)
        for work, did, depth in zip(step.work, ran.done, depths, strict=True):
            request = self._holdings[work.slot]
            ack.add(work.slot, did)
            self._count(request, did, depth)
            if did.computed > 1 and not did.drafted:
                chunks.append(Chunk(work.slot, did.computed - did.cached, len(did.tokens) > 0))
            if not did.has_output:
                continue
            outgoing.append(request.delta(did))
            before = request.measure
            thinking_tokens = request.extend(did, ended_unix_s)
            if thinking_tokens is not None:
                ack.add_answering(work.slot, thinking_tokens)
            if not before.tokens and did.tokens:
                firsts.append(work.slot)
            if request.measure.late_tokens and not before.late_tokens:
                found = before.first_late(
                    len(did.tokens), ended_unix_s, request.record.slo, thinking_tokens
                )
                late.append((work.slot, *found))
            if did.finish is not None:
                ending.append((request, did))
            elif request.record.then is not None:
                self._holdings.end_later(request, HANDED_OVER)
        self._note_orders(step.plan, started_unix_s)
        self._accounting.ran([work.slot for work in step.work], chunks, spent)
        self._accounting.note(Happened.FIRST_TOKEN, firsts, ended_unix_s)
        for slot, token, due_unix_s in late:
            self._accounting.late(slot, token, due_unix_s)
            ack.add_late(slot)
        overs: list[AttemptOver] = []
        for request, did in ending:
            assert did.finish is not None
            request.loaded = request.loaded and not did.refused
            request.message = did.message or request.message
            overs.append(self._end(request, did.finish.value, ack))
        return self._finished(ack, outgoing, overs)

    def _note_orders(self, plan: BatchPlan, at_unix_s: float) -> None:
        for what, slots in (
            (Happened.PREEMPTED, plan.preempted),
            (Happened.RELEGATED, plan.relegated),
            (Happened.PROMOTED, plan.promoted),
        ):
            if slots:
                self._accounting.note(what, unpack_list(slots), at_unix_s)

    def break_off(self) -> Finished:
        """The engine is gone in the running step. The step's requests are over here, since one of
        them may be the reason.
        """
        step, self._running = self._running, None
        assert step is not None
        for work in step.work:
            if not self._holdings.is_ending(work.slot):
                self._holdings.end_later(self._holdings[work.slot], ENGINE_DIED)
        return self._finished(AckBuilder(), [], [])

    def between(self) -> Finished | None:
        """The ends that are due while nothing runs; None if there are none."""
        if self._running is not None or not self._holdings.ending:
            return None
        return self._finished(AckBuilder(), [], [])

    def _count(self, request: HeldRequest, did: TurnDone, depth: int) -> None:
        """Count the iteration's tokens and the KV positions that it filled, the draft's too."""
        if not request.begun:
            request.take_first_chunk(did)
        drafted = depth > 0 and request.decodes and did.computed > 0
        self._holdings.fill(request, request.computed + did.computed)
        if drafted:  # the draft model has read it, even if nothing was verified
            request.drafted = request.computed
        if did.drafted:
            application = request.record.application
            self._draft_yields.observe(application, did.drafted, did.computed - 1)

    def _class_changes(self, plan: BatchPlan) -> list[Outgoing]:
        return [
            request.status(what, service_class, self.replica)
            for what, service_class, slots in (
                ("relegated", ServiceClass.BEST_EFFORT, plan.relegated),
                ("promoted", ServiceClass.STANDARD, plan.promoted),
            )
            for request in self._named(slots)
        ]

    def _finished(
        self, ack: AckBuilder, outgoing: list[Outgoing], overs: list[AttemptOver]
    ) -> Finished:
        """The ends that were due join those that the iteration brought; then the ack is whole."""
        overs += [self._end(due, due.pending_end, ack) for due in self._holdings.due()]
        self.ack_seq += 1
        built = ack.build(
            replica=self.replica,
            incarnation=self.incarnation,
            epoch=self._plans.epoch,
            ack_seq=self.ack_seq,
            held=self._holdings.take_new(),
            free_blocks=self._holdings.free_blocks,
        )
        return Finished(built, outgoing, overs)

    def _end(self, request: HeldRequest, why: str, ack: AckBuilder) -> AttemptOver:
        """The attempt leaves: its slot is free, and it is reported until it is settled."""
        ack.add_end(request.slot, why)
        self._holdings.remove(request)
        timeline = self._accounting.leave(request.slot)
        if why not in FINAL:
            timeline = timeline.left(self.replica, why, timeline.account.until_unix_s)
        over = request.over(why, self.replica, self.incarnation, timeline, self._kv_address)
        self._unsettled[over.key, over.attempt] = over
        return over
