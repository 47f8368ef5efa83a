"""WorkerCore: what one worker holds and what its next iteration is. Sans-IO; the shell moves
messages and runs the engine.

Nothing here waits: `begin` turns the next plan into exact work, `finish` turns what the engine did
into the ack, the deltas that may leave once that ack is stored, and the attempts that are over.
Cancels and withdrawals take effect between iterations.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.columns import pack, unpack_list
from shared.core.offer import offer_of
from shared.core.record import held as held_by_record
from shared.core.snapshot_pages import pages
from shared.core.turn import Finished, Outgoing, Turn, TurnDone, TurnLoad, TurnWork
from shared.policy.speculation import along
from shared.schemas import (
    AttemptOver,
    BatchPlan,
    Body,
    Delta,
    Held,
    Hold,
    HoldAccepted,
    HoldAnswer,
    HoldDeclined,
    HoldInDoubt,
    Offer,
    PlanAck,
    PlanRefused,
    Record,
    Resume,
    ResyncEntry,
    Sampling,
    Selection,
    Snapshot,
    SnapshotEntry,
    Status,
    TokenLogprob,
)
from shared.vocabulary import FinishReason, Measure, ReplicaId, RequestKey, ServiceClass

# of a prompt: where a chat template closes the thinking that it does not want (Qwen3: `</think>`,
# line ends)
TEMPLATE_END_TOKENS = 4
TOMBSTONES = 4096  # withdrawn or cancelled requests remembered, so that a late hold is refused


@dataclass(slots=True)
class _Request:
    slot: int
    record: Record
    sampling: Sampling
    adapter: str
    prompt: Sequence[int]
    resumed: int  # tokens made by earlier attempts
    tokens: list[int]  # all output, all attempts
    text: str
    measure: Measure
    service_class: ServiceClass
    relegated: bool
    seed: int
    stops: frozenset[int]
    logprobs: list[TokenLogprob]  # along `tokens`, if asked for
    thinks_for: int | None  # tokens of its output that are thinking, where that is known beforehand
    computed: int = 0
    drafted: int = 0  # positions filled in the draft model's KV
    loaded: bool = False  # engine and speaker know it
    pending_end: str = ""  # to end at the next boundary
    message: str = ""

    @property
    def known_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass(slots=True)
class WorkerCounters:
    plans: int = 0
    iterations: int = 0
    tokens: int = 0
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # of these
    verifications: int = 0  # entries that had drafts verified
    exec_s: float = 0.0
    idle_s: float = 0.0
    ended: dict[str, int] = field(default_factory=dict)


class WorkerCore:
    """One incarnation of one worker."""

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
    ) -> None:
        self.replica = replica
        self.incarnation = incarnation
        self.epoch = 0
        self.counters = WorkerCounters()
        self._sync = 0
        self._kv_blocks = kv_blocks
        self._block_tokens = block_tokens
        self._context_tokens = context_tokens
        self._max_slots = max_slots
        self._eos = eos_token_ids
        self._end_of_thinking = end_of_thinking
        self._next_seq = 1  # the plan expected next
        self._begun_seq = 0
        self._ack_seq = 0
        self._queue: deque[BatchPlan] = deque()
        self._running: Turn | None = None
        self._requests: dict[int, _Request] = {}
        self._slot_of: dict[RequestKey, int] = {}
        # slots that engine and speaker must forget before their next work
        self._releases: list[int] = []
        self._new_holds: list[Held] = []
        self._held_blocks = 0
        self._ending: set[int] = set()
        self._tombstones: OrderedDict[RequestKey, int] = OrderedDict()  # highest attempt refused
        self._unsettled: dict[tuple[RequestKey, int], AttemptOver] = {}

    # ------------------------------------------------------------ planner's side

    def resync(self, epoch: int, sync: int) -> bool:
        """A planner takes over, or lost its picture: drop plans not begun. False if its epoch is
        stale.
        """
        if (epoch, sync) < (self.epoch, self._sync):
            return False
        self.epoch, self._sync = epoch, sync
        self._queue.clear()
        self._next_seq = self._begun_seq + 1
        return True

    @property
    def next_seq(self) -> int:
        return self._next_seq

    @property
    def ack_seq(self) -> int:
        return self._ack_seq

    def entries(self) -> list[ResyncEntry]:
        """Every request held, as it is between iterations."""
        return [
            ResyncEntry(
                slot=r.slot,
                offer=self._offer(r),
                computed_tokens=r.computed,
                generated_tokens=len(r.tokens),
                draft_tokens=r.drafted,
            )
            for r in self._requests.values()
        ]

    def hold(self, hold: Hold, record: Record, body: Body) -> HoldAnswer:
        """Take a request in. `record` was read from the store after the hold came."""
        holder = self._slot_of.get(hold.key)
        held = None if holder is None else self._requests[holder]
        if held is not None and (held.record.attempt, holder) == (hold.attempt, hold.slot):
            return HoldAccepted()
        if (hold.epoch, hold.sync) != (self.epoch, self._sync):
            # Another planner, or this one after a resync, may have been asked the same: only a
            # withdrawal tells.
            return HoldInDoubt(reason="stale epoch")
        if hold.attempt <= self._tombstones.get(hold.key, -1):
            return HoldDeclined(reason="withdrawn")
        if held is not None and hold.attempt < held.record.attempt:
            return HoldDeclined(reason="held under a later attempt")
        if held is not None:
            return HoldInDoubt(reason="held under another attempt")
        if held_by_record(record, self.replica, self.incarnation, attempt=hold.attempt) is None:
            return HoldDeclined(reason="the record says otherwise")
        if not 0 <= hold.slot < self._max_slots or hold.slot in self._requests:
            return HoldInDoubt(reason="slot taken")
        resume = record.resume
        tokens = unpack_list(resume.tokens)
        sampling, prompt = body.sampling, unpack_list(body.prompt)
        self._requests[hold.slot] = _Request(
            slot=hold.slot,
            record=record,
            sampling=sampling,
            adapter=body.adapter,
            prompt=prompt,
            resumed=len(tokens),
            tokens=tokens,
            text=resume.text,
            measure=resume.measure if tokens else Measure.begin(record.slo, record.arrived_unix_s),
            service_class=record.service_class,
            relegated=record.relegated,
            seed=seed_of(record.key, sampling),
            stops=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self._eos),
            logprobs=list(resume.logprobs),
            thinks_for=self._thinks_for(sampling, prompt),
        )
        self._slot_of[hold.key] = hold.slot
        self._new_holds.append(
            Held(
                slot=hold.slot,
                key=hold.key,
                attempt=hold.attempt,
                offset=len(tokens),
                text_offset=len(resume.text),
            )
        )
        return HoldAccepted()

    def plan(self, plan: BatchPlan) -> PlanRefused | None:
        """Queue a plan, or say why not."""
        reason = ""
        if plan.incarnation != self.incarnation:
            reason = "another incarnation"
        elif (plan.epoch, plan.sync) != (self.epoch, self._sync):
            if plan.epoch < self.epoch or (plan.epoch == self.epoch and plan.sync < self._sync):
                return None  # its sender knows better by now, or will learn it from its lease
            reason = "resync first"
        elif plan.seq < self._next_seq:
            return None  # doubled
        elif plan.seq > self._next_seq:
            reason = "a plan is missing"
        elif not _well_formed(plan, self._max_slots):
            reason = "columns of different lengths, or slots out of range"
        if reason:
            return PlanRefused(
                incarnation=self.incarnation,
                epoch=self.epoch,
                expected_seq=self._next_seq,
                reason=reason,
            )
        self._queue.append(plan)
        self._next_seq += 1
        return None

    # ------------------------------------------------------------ client's and admission's side

    def cancel(self, key: RequestKey, reason: str) -> None:
        """End a request at the next boundary; refuse any hold of it that comes later.

        Of a request that is not here, its record will say that it was cancelled: a tombstone would
        outlive a cancel of nothing.
        """
        slot = self._slot_of.get(key)
        if slot is not None:
            self._bury(key, 1 << 30)
            self._requests[slot].message = reason
            self._end_later(slot, FinishReason.CANCELLED)

    def withdraw(self, key: RequestKey, attempt: int) -> AttemptOver | bool:
        """True: it is held, and will be over at the next boundary. Else what it made, or False if
        it never came here.
        """
        over = self._unsettled.get((key, attempt))
        if over is not None:
            return over
        self._bury(key, attempt)
        slot = self._slot_of.get(key)
        if slot is None or self._requests[slot].record.attempt != attempt:
            return False
        self._end_later(slot, "withdrawn")
        return True

    def knows(self, key: RequestKey, attempt: int) -> bool:
        slot = self._slot_of.get(key)
        return (key, attempt) in self._unsettled or (
            slot is not None and self._requests[slot].record.attempt == attempt
        )

    def drain(self) -> None:
        """Give every request back, to go on elsewhere."""
        for slot in list(self._requests):
            self._end_later(slot, "drained")

    def settled(self, key: RequestKey, attempt: int) -> None:
        self._unsettled.pop((key, attempt), None)

    @property
    def unsettled(self) -> list[AttemptOver]:
        return list(self._unsettled.values())

    def _bury(self, key: RequestKey, attempt: int) -> None:
        self._tombstones[key] = max(attempt, self._tombstones.get(key, -1))
        self._tombstones.move_to_end(key)
        if len(self._tombstones) > TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _end_later(self, slot: int, why: str) -> None:
        self._requests[slot].pending_end = why
        self._ending.add(slot)

    # ------------------------------------------------------------ iterations

    @property
    def running(self) -> bool:
        return self._running is not None

    @property
    def waiting_plans(self) -> int:
        return len(self._queue)

    @property
    def held(self) -> int:
        return len(self._requests)

    @property
    def closing(self) -> int:
        """Requests that will be over at the next boundary."""
        return len(self._ending)

    def between(self) -> Finished | None:
        """Ends that are due while nothing runs; None if there are none."""
        if self._running is not None or not self._ending:
            return None
        return self._ack(None, [], [], 0.0, 0.0, 0.0, 0.0)

    def begin(self) -> Turn | None:
        """The next plan as exact work, or a turn of releases alone; None if there is neither."""
        assert self._running is None
        if not self._queue:
            return self._turn(None, [], [], [], []) if self._releases else None
        plan = self._queue.popleft()
        self._begun_seq = plan.seq
        self.counters.plans += 1
        for slot, why in zip(unpack_list(plan.released), plan.released_why, strict=True):
            if slot in self._requests:
                self._end_later(slot, why)
        preempts = []
        for slot in unpack_list(plan.preempted):
            request = self._requests.get(slot)
            if request is not None and request.loaded:
                self._filled(request, 0)
                request.drafted = 0
                preempts.append(slot)
        # frees its KV before this plan's entries run, and is reported with them
        for slot in self._ending:
            self._let_go(self._requests[slot])
        self._set_class(plan.relegated, ServiceClass.BEST_EFFORT)
        self._set_class(plan.promoted, ServiceClass.STANDARD)
        work, loads, skipped, selection = self._work(plan)
        self._running = self._turn(plan, preempts, loads, work, skipped, selection)
        return self._running

    def _turn(
        self,
        plan: BatchPlan | None,
        preempts: list[int],
        loads: list[TurnLoad],
        work: list[TurnWork],
        skipped: list[int],
        selection: Selection | None = None,
    ) -> Turn:
        releases, self._releases = self._releases, []
        return Turn(plan, preempts, releases, loads, work, selection, skipped)

    def _let_go(self, request: _Request) -> None:
        """Its KV and its voice go before the engine's next work."""
        if request.loaded:
            self._releases.append(request.slot)
        request.loaded = False
        self._filled(request, 0)
        request.drafted = 0

    def _filled(self, request: _Request, computed: int) -> None:
        """So many KV positions of it are filled now; the sum of blocks is kept, for it goes into
        every ack.
        """
        self._held_blocks += -(-computed // self._block_tokens) - -(
            -request.computed // self._block_tokens
        )
        request.computed = computed

    def _work(
        self, plan: BatchPlan
    ) -> tuple[list[TurnWork], list[TurnLoad], list[int], Selection | None]:
        """A decode speculates where the plan says so and nowhere else, never past its own end;
        chunks are cut to what is left.
        """
        work: list[TurnWork] = []
        loads: list[TurnLoad] = []
        skipped: list[int] = []
        kept: list[int] = []  # entries of the plan that run
        depths = None if plan.selection is None else unpack_list(plan.selection.depth)
        for entry, (slot, cap) in enumerate(
            zip(unpack_list(plan.slots), unpack_list(plan.caps), strict=True)
        ):
            request = self._requests.get(slot)
            if request is None or slot in self._ending:
                skipped.append(slot)
                continue
            left = request.known_tokens - request.computed  # 1 for a decode
            limit, reason = self._limit(request)
            speculates = (
                depths is not None and depths[entry] > 0 and left == 1 and len(request.tokens) > 0
            )
            tokens = min(cap, limit) if speculates else min(cap, left)
            kept.append(entry)
            work.append(TurnWork(slot, tokens, tokens >= left, limit, reason, request.stops))
            if not request.loaded:
                request.loaded = True
                known = [*request.prompt, *request.tokens]
                resume = Resume(tokens=pack(request.tokens), text=request.text)
                loads.append(
                    TurnLoad(
                        slot,
                        known,
                        len(request.tokens),
                        request.sampling,
                        request.seed,
                        request.adapter,
                        resume,
                    )
                )
        return (
            work,
            loads,
            skipped,
            plan.selection
            if not skipped or plan.selection is None
            else along(plan.selection, kept),
        )

    def _limit(self, request: _Request) -> tuple[int, FinishReason]:
        """How many more tokens the request may have, and what its end is called if it comes by
        that.
        """
        made = len(request.tokens)
        room = self._context_tokens - len(request.prompt) - made
        limit, reason = min(request.sampling.max_tokens - made, room), FinishReason.LENGTH
        if (
            request.sampling.output_tokens is not None
            and request.sampling.output_tokens - made <= limit
        ):
            limit, reason = request.sampling.output_tokens - made, FinishReason.STOP
        return limit, reason

    def _thinks_for(self, sampling: Sampling, prompt: Sequence[int]) -> int | None:
        """So many output tokens, if that is known before the first. A chat template ends thinking
        in the prompt where it is not wanted.
        """
        if sampling.thinking_tokens is not None:
            return sampling.thinking_tokens
        return 0 if self._end_of_thinking in (None, *prompt[-TEMPLATE_END_TOKENS:]) else None

    def _thought(self, request: _Request, tokens: Sequence[int]) -> int | None:
        """How many of its output tokens are thinking, if these, the newest, show it; None: it
        thinks on, or that was known before.
        """
        if not tokens or not request.measure.thinking(request.record.slo):
            return None
        before = len(request.tokens) - len(tokens)
        if request.thinks_for is not None:
            return request.thinks_for if len(request.tokens) >= request.thinks_for else None
        return (
            before + tokens.index(self._end_of_thinking) + 1
            if self._end_of_thinking in tokens
            else None
        )

    def _set_class(self, slots: bytes, service_class: ServiceClass) -> None:
        for slot in unpack_list(slots):
            request = self._requests.get(slot)
            if request is not None:
                request.service_class = service_class
                request.relegated = request.relegated or service_class is ServiceClass.BEST_EFFORT

    def finish(
        self,
        done: Sequence[TurnDone],
        *,
        started_unix_s: float,
        ended_unix_s: float,
        exec_s: float,
        idle_s: float,
        outside_s: float = 0.0,
    ) -> Finished:
        """The running turn is over."""
        turn = self._running
        assert turn is not None and turn.plan is not None
        self._running = None
        self.counters.iterations += 1
        self.counters.exec_s += exec_s
        self.counters.idle_s += idle_s
        return self._ack(
            turn, turn.work, done, started_unix_s, ended_unix_s, exec_s, idle_s, outside_s
        )

    def _ack(
        self,
        turn: Turn | None,
        work: Sequence[TurnWork],
        done: Sequence[TurnDone],
        started_unix_s: float,
        ended_unix_s: float,
        exec_s: float,
        idle_s: float,
        outside_s: float = 0.0,
    ) -> Finished:
        plan = None if turn is None else turn.plan
        slots: list[int] = []
        computed: list[int] = []
        emitted: list[int] = []
        tokens: list[int] = []
        texts: list[str] = []
        logprobs: list[TokenLogprob] = []
        logprob_slots: list[int] = []
        drafted: list[int] = []
        cached: list[int] = []
        answering: list[tuple[int, int]] = []
        ended: list[tuple[int, str]] = []
        outgoing: list[Outgoing] = []
        overs: list[AttemptOver] = []
        if plan is not None:
            self._announce_class(plan, outgoing)
        for entry, did in zip(work, done, strict=True):
            request = self._requests[entry.slot]
            record = request.record
            self._filled(request, request.computed + did.computed)
            if did.drafted:
                request.drafted = request.computed
                self.counters.drafted += did.drafted
                self.counters.accepted += did.computed - 1
                self.counters.verifications += 1
            slots.append(entry.slot)
            computed.append(did.computed)
            emitted.append(len(did.tokens))
            drafted.append(did.drafted)
            cached.append(did.cached)
            if did.tokens or did.finish is not None:
                tokens.extend(did.tokens)
                texts.append(did.text)
                if did.logprobs:
                    logprobs.extend(did.logprobs)
                    logprob_slots.append(entry.slot)
                outgoing.append(
                    Outgoing(
                        record.stream_subject,
                        record.json,
                        Delta(
                            attempt=record.attempt,
                            offset=len(request.tokens),
                            tokens=list(did.tokens),
                            text=did.text,
                            text_offset=len(request.text),
                            finish_reason=did.finish,
                            logprobs=list(did.logprobs),
                        ),
                    )
                )
                request.tokens.extend(did.tokens)
                request.text += did.text
                request.logprobs.extend(did.logprobs)
                thought = self._thought(request, did.tokens)
                if thought is not None:
                    answering.append((entry.slot, thought))
                request.measure = request.measure.emit(
                    len(did.tokens), ended_unix_s, record.slo, thought
                )
                if did.finish is not None:
                    request.loaded = request.loaded and not did.refused
                    request.message = did.message or request.message
                    self._ending.discard(entry.slot)
                    ended.append((entry.slot, did.finish.value))
                    overs.append(self._over(request, did.finish.value))
        for slot in sorted(self._ending):
            request = self._requests[slot]
            ended.append((slot, request.pending_end))
            overs.append(self._over(request, request.pending_end))
        self._ending.clear()
        self.counters.tokens += len(tokens)
        self._ack_seq += 1
        holds, self._new_holds = self._new_holds, []
        ack = PlanAck(
            replica=self.replica,
            incarnation=self.incarnation,
            epoch=self.epoch if plan is None else plan.epoch,
            plan_seq=0 if plan is None else plan.seq,
            ack_seq=self._ack_seq,
            slots=pack(slots),
            computed=pack(computed),
            emitted=pack(emitted),
            tokens=pack(tokens),
            texts=texts,
            logprobs=logprobs,
            logprob_slots=pack(logprob_slots),
            ended=ended,
            held=holds,
            preempted=b"" if plan is None else plan.preempted,
            relegated=b"" if plan is None else plan.relegated,
            promoted=b"" if plan is None else plan.promoted,
            skipped=b"" if turn is None else pack(turn.skipped),
            drafted=pack(drafted) if any(drafted) else b"",
            cached=pack(cached) if any(cached) else b"",
            answering=pack([slot for slot, _ in answering]) if answering else b"",
            thinking_tokens=pack([thought for _, thought in answering]) if answering else b"",
            free_blocks=self.free_blocks,
            started_unix_s=started_unix_s,
            ended_unix_s=ended_unix_s,
            exec_s=exec_s,
            outside_s=outside_s,
            idle_s=idle_s,
        )
        return Finished(ack, outgoing, overs)

    def _announce_class(self, plan: BatchPlan, outgoing: list[Outgoing]) -> None:
        for slots, state, service_class in (
            (plan.relegated, "relegated", ServiceClass.BEST_EFFORT),
            (plan.promoted, "promoted", ServiceClass.STANDARD),
        ):
            for slot in unpack_list(slots):
                request = self._requests.get(slot)
                if request is not None:
                    record = request.record
                    status = Status(
                        state=state,
                        service_class=service_class,
                        attempt=record.attempt,
                        replica=self.replica,
                    )
                    outgoing.append(Outgoing(record.stream_subject, record.json, status))

    def _over(self, request: _Request, why: str) -> AttemptOver:
        """The attempt leaves: its slot is free, its KV goes before the engine's next work."""
        record = request.record
        del self._requests[request.slot]
        del self._slot_of[record.key]
        self._let_go(request)
        over = AttemptOver(
            key=record.key,
            attempt=record.attempt,
            replica=self.replica,
            incarnation=self.incarnation,
            why=why,
            relegated=request.relegated or why == "relegated",
            service_class=request.service_class,
            resume=Resume(
                tokens=pack(request.tokens),
                text=request.text,
                measure=request.measure,
                logprobs=request.logprobs,
            ),
            message=request.message,
        )
        self._unsettled[record.key, record.attempt] = over
        self.counters.ended[why] = self.counters.ended.get(why, 0) + 1
        return over

    # ------------------------------------------------------------ books

    @property
    def free_blocks(self) -> int:
        return self._kv_blocks - self._held_blocks

    def snapshots(self) -> list[Snapshot]:
        """All that must outlive a trim of the log, in pages. Called right after an ack was built,
        so nothing is half said.
        """
        entries = []
        for request in self._requests.values():
            if any(h.key == request.record.key for h in self._new_holds):
                continue
            record = request.record
            held = Held(
                slot=request.slot, key=record.key, attempt=record.attempt, offset=0, text_offset=0
            )
            entry = SnapshotEntry(
                held=held,
                tokens=pack(request.tokens),
                text=request.text,
                measure=request.measure,
                service_class=request.service_class,
                relegated=request.relegated,
                logprobs=list(request.logprobs),
            )
            entries.append(entry)
        return pages(self.incarnation, entries, self.unsettled)

    def _offer(self, request: _Request) -> Offer:
        return offer_of(request.record, request.service_class, request.measure, request.resumed)

    def check(self) -> None:
        """Raises AssertionError unless the books balance."""
        assert self.free_blocks >= 0, "KV beyond capacity"
        assert self._held_blocks == sum(
            -(-r.computed // self._block_tokens) for r in self._requests.values()
        ), "blocks do not add up"
        assert {r.record.key: s for s, r in self._requests.items()} == self._slot_of
        assert self._ending <= set(self._requests)
        for request in self._requests.values():
            assert 0 <= request.computed <= max(request.known_tokens - 1, len(request.prompt)), (
                "computed beyond what is known"
            )
            assert request.measure.tokens == len(request.tokens), "tokens without a measure"


def _well_formed(plan: BatchPlan, max_slots: int) -> bool:
    """Columns run in parallel, slots exist, caps are positive, nobody is named twice."""
    columns = [plan.slots, plan.caps, plan.released, plan.preempted, plan.relegated, plan.promoted]
    if plan.selection is not None:
        columns += [plan.selection.depth, plan.selection.width, plan.selection.needed]
        if (
            not len(plan.selection.depth)
            == len(plan.selection.width)
            == len(plan.selection.needed)
            == len(plan.slots)
        ):
            return False
    if (
        any(len(column) % 4 for column in columns)
        or len(plan.slots) != len(plan.caps)
        or len(plan.released) != 4 * len(plan.released_why)
    ):
        return False
    slots = unpack_list(plan.slots)
    named = [
        *slots,
        *unpack_list(plan.released),
        *unpack_list(plan.preempted),
        *unpack_list(plan.relegated),
        *unpack_list(plan.promoted),
    ]
    in_range = all(0 <= slot < max_slots for slot in named)
    return (
        in_range
        and len(set(slots)) == len(slots)
        and all(cap > 0 for cap in unpack_list(plan.caps))
    )


def seed_of(key: RequestKey, sampling: Sampling) -> int:
    """What a request draws from: its own seed, or one from its name (FNV-1a), so that a moved
    request draws on alike.
    """
    if sampling.seed is not None:
        return sampling.seed
    value = 0xCBF29CE484222325
    for byte in key.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value >> 1
