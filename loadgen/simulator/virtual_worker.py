"""A worker and its engine in virtual time, as columns: what a WorkerCore would do with a plan, at a
cost that does not grow with its batch.

It decides nothing: plans say what runs, the profiles of target and draft how long, the acceptance
model which drafts are kept. tests/fleet/test_drivers_agree.py holds it to the real WorkerCore.
Nobody reads text or tokens here, so there are none: an output is the instants of its tokens, and
the measure is taken from them at the end.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.columns import Ints, pack, unpack, unpack_list
from shared.core.held_request import seed_of
from shared.core.worker import WorkerCounters
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.acceptance import Acceptance, some_of, speculate
from shared.schemas import (
    Announce,
    AttemptOver,
    BatchPlan,
    Body,
    Hold,
    HoldAccepted,
    PlanAck,
    Record,
    Resume,
    Selection,
)
from shared.vocabulary import FinishReason, Measure, ServiceClass, Slo


@dataclass(slots=True)
class _Request:
    record: Record
    times: "array[float]"
    reason: FinishReason  # what its end is called
    service_class: ServiceClass
    relegated: bool
    thinking_tokens: int | None  # as in Measure


NEVER = 1 << 30  # tokens: longer than any output


class _Running(NamedTuple):
    """The iteration under way. `alike`: none of its prefills ends, nor does a request, so another
    one just like it may follow.
    """

    plan: BatchPlan
    slots: Ints
    fills: Ints  # KV positions while it runs, rejected drafts included
    tokens: Ints  # of these, the ones that are kept
    emits: NDArray[np.bool_]
    drafted: Ints | None  # draft tokens verified; None: the plan does not speculate
    skipped: bytes
    shape: BatchShape
    ending: Sequence[tuple[int, str]]
    alike: bool


class VirtualWorker:
    """One replica's worker. Columns are indexed by slot."""

    def __init__(
        self, announce: Announce, profile: Profile, draft: Profile | None, acceptance: Acceptance
    ) -> None:
        self._announce, self._profile, self._draft, self._acceptance = (
            announce,
            profile,
            draft,
            acceptance,
        )
        self.counters = WorkerCounters()
        self._queue: deque[BatchPlan] = deque()
        self._running: _Running | None = None
        self._requests: dict[int, _Request] = {}
        self._next_seq, self._ack_seq = 1, 0
        slots = announce.max_slots
        self._here = np.zeros(slots, dtype=np.bool_)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._prompt: Ints = np.zeros(slots, dtype=np.int32)
        self._known: Ints = np.zeros(slots, dtype=np.int32)  # prompt and output tokens
        self._computed: Ints = np.zeros(slots, dtype=np.int32)
        self._drafted: Ints = np.zeros(slots, dtype=np.int32)  # positions filled in the draft's KV
        self._left: Ints = np.zeros(slots, dtype=np.int32)  # output tokens until it ends
        # output tokens until its thinking ends
        self._thinking: Ints = np.full(slots, NEVER, dtype=np.int32)
        self._thinkers = 0  # slots in which it will
        # has emitted since its KV was last filled from nothing
        self._decoding = np.zeros(slots, dtype=np.bool_)
        self._emit: list[Callable[[float], None]] = [_nobody] * slots

    @property
    def running(self) -> bool:
        return self._running is not None

    @property
    def held(self) -> int:
        return len(self._requests)

    def hold(self, hold: Hold, record: Record, body: Body, times: "array[float]") -> HoldAccepted:
        """Take a request in; `times` has the tokens of earlier attempts, and takes those to
        come.
        """
        assert hold.attempt == record.attempt and not self._here[hold.slot], (
            f"slot {hold.slot} of {self._announce.replica}"
        )
        made = record.resume.measure.tokens
        assert made == len(times)
        sampling = body.sampling
        left, reason = (
            min(sampling.max_tokens, self._announce.context_tokens - record.prompt_tokens) - made,
            FinishReason.LENGTH,
        )
        if sampling.output_tokens is not None and sampling.output_tokens - made <= left:
            left, reason = sampling.output_tokens - made, FinishReason.STOP
        slot = hold.slot
        self._requests[slot] = _Request(
            record,
            times,
            reason,
            record.service_class,
            record.relegated,
            record.resume.measure.thinking_tokens,
        )
        thinks = record.resume.measure.thinking(record.slo)
        # no token here is one that ends it
        self._thinking[slot] = (sampling.thinking_tokens or 0) - made if thinks else NEVER
        self._thinkers += thinks
        self._here[slot], self._decoding[slot] = True, False
        self._prompt[slot], self._seed[slot] = (
            record.prompt_tokens,
            seed_of(record.key, sampling) % (1 << 64),
        )
        self._known[slot], self._computed[slot], self._drafted[slot], self._left[slot] = (
            record.prompt_tokens + made,
            0,
            0,
            left,
        )
        self._emit[slot] = times.append
        return HoldAccepted()

    def plan(self, plan: BatchPlan) -> None:
        assert plan.seq == self._next_seq, (
            f"{self._announce.replica}: plan {plan.seq} came for {self._next_seq}"
        )
        self._next_seq += 1
        self._queue.append(plan)

    def begin(self) -> float | None:
        """Begin the next plan; the seconds it takes, or None without one. A plan of releases alone
        takes none.
        """
        assert self._running is None
        if not self._queue:
            return None
        plan = self._queue.popleft()
        ending: list[tuple[int, str]] = []
        if plan.released:
            ending = [
                (s, why)
                for s, why in zip(unpack_list(plan.released), plan.released_why, strict=True)
                if self._here[s]
            ]
        for slot in unpack_list(plan.preempted) if plan.preempted else ():
            self._computed[slot], self._drafted[slot], self._decoding[slot] = 0, 0, False
        self._set_class(plan.relegated, ServiceClass.BEST_EFFORT)
        self._set_class(plan.promoted, ServiceClass.STANDARD)
        slots, caps, skipped = unpack(plan.slots), unpack(plan.caps), b""
        gone = ~self._here[slots]
        if ending:
            gone |= np.isin(slots, [slot for slot, _ in ending])
        if gone.any():
            skipped = pack(slots[gone])
            slots, caps = slots[~gone], caps[~gone]
        has = self._computed[slots]
        wanted = self._known[slots] - has
        tokens: Ints = np.minimum(caps, wanted)
        decodes, emits = self._decoding[slots], tokens >= wanted
        if plan.selection is not None:
            selection = some_of(plan.selection, ~gone) if skipped else plan.selection
            return self._speculate(plan, selection, slots, caps, skipped, ending)
        emitting, decoding = np.count_nonzero(emits), np.count_nonzero(decodes)
        alone = decoding == len(slots)
        shape = (
            BatchShape(decodes=len(slots), decode_context=int(has.sum()))
            if alone
            else _shape(has, tokens, decodes)
        )
        alike = emitting == decoding and not ending and not skipped
        self._running = _Running(
            plan, slots, tokens, tokens, emits, None, skipped, shape, ending, alike
        )
        return self._profile.batch_s(shape)

    def _speculate(
        self,
        plan: BatchPlan,
        selection: Selection,
        slots: Ints,
        caps: Ints,
        skipped: bytes,
        ending: Sequence[tuple[int, str]],
    ) -> float:
        """Begin an iteration some of whose entries draft first; its seconds. Outputs are never
        drafted past their end.
        """
        assert self._draft is not None, "speculation without a draft model"
        has, made = self._computed[slots], self._known[slots] - self._prompt[slots]
        left = self._known[slots] - has
        drafts = (unpack(selection.depth) > 0) & (left == 1) & (made > 0)
        most: Ints = np.minimum(caps, np.where(drafts, self._left[slots], left))
        did = speculate(
            self._draft,
            self._acceptance,
            selection,
            most,
            seeds=self._seed[slots],
            made=made,
            has=has,
            left=left,
            filled=self._drafted[slots],
        )
        self._drafted[slots] = did.filled
        shape = _shape(has, did.fills, self._decoding[slots])
        self._running = _Running(
            plan,
            slots,
            did.fills,
            did.kept,
            most >= left,
            did.drafted,
            skipped,
            shape,
            ending,
            False,
        )
        return did.drafted_s + self._profile.batch_s(shape)

    @property
    def worked(self) -> bool:
        """The iteration under way computes something."""
        assert self._running is not None
        return len(self._running.slots) > 0

    # ------------------------------------------------------------ leaps

    def alike(self, most: int) -> list[float]:
        """Seconds of the iteration under way and of those after it, at most so many, if each is
        just like it but for its contexts: no prefill ends, and no stage or request before the last.
        Contexts grow by what each entry computes, so the shapes are known.
        """
        running = self._running
        assert running is not None
        if most < 2 or not running.alike or not len(running.slots):
            return []
        told = running.slots[running.emits]
        steps = (
            min(most, int(np.minimum(self._left[told], self._thinking[told]).min()))
            if len(told)
            else most
        )
        prefill_tokens, prefills, sq, cross, has, decodes, context = running.shape
        if prefills:
            chunks, tokens = running.slots[~running.emits], running.tokens[~running.emits]
            steps = min(
                steps, int(((self._known[chunks] - self._computed[chunks] - 1) // tokens).min())
            )
        batch_s = self._profile.batch_s
        return [
            batch_s(
                BatchShape(
                    prefill_tokens,
                    prefills,
                    sq,
                    cross + n * sq,
                    has + n * prefill_tokens,
                    decodes,
                    context + n * decodes,
                )
            )
            for n in range(steps)
        ]

    def leap(self, ends_unix_s: Sequence[float], exec_s: float) -> None:
        """The iteration under way has ended at each of these instants and begun again; `exec_s` in
        all.
        """
        running = self._running
        assert running is not None
        n, told = len(ends_unix_s), running.slots[running.emits]
        self._computed[running.slots] += n * running.tokens
        self._known[told] += n
        self._left[told] -= n
        self._thinking[told] -= n
        for slot in told.tolist():
            self._requests[slot].times.extend(ends_unix_s)
        self.counters.iterations += n
        self.counters.tokens += n * len(told)
        self.counters.exec_s += exec_s
        prefill_tokens, prefills, sq, cross, has, decodes, context = running.shape
        shape = BatchShape(
            prefill_tokens,
            prefills,
            sq,
            cross + n * sq,
            has + n * prefill_tokens,
            decodes,
            context + n * decodes,
        )
        self._running = running._replace(shape=shape)

    # ------------------------------------------------------------ ends

    def finish(
        self, *, started_unix_s: float, ended_unix_s: float, exec_s: float, idle_s: float
    ) -> tuple[PlanAck, list[AttemptOver]]:
        """The running iteration is over."""
        running = self._running
        assert running is not None
        self._running = None
        plan, slots, emits, drafted = running.plan, running.slots, running.emits, running.drafted
        emitted = emits.astype(np.int32)
        # a speculating entry keeps its root and emits a token for each position that it keeps
        if drafted is not None:
            emitted = np.where(drafted > 0, running.tokens, emitted)
        answering: list[tuple[int, int]] = []
        ended: list[tuple[int, str]] = []
        overs: list[AttemptOver] = []
        if len(slots):
            self.counters.iterations += 1
            self.counters.exec_s += exec_s
            self.counters.idle_s += idle_s
            self._computed[slots] += running.tokens
            told = slots[emits]
            made = emitted if len(told) == len(slots) else emitted[emits]
            self.counters.tokens += int(made.sum())
            self._known[told] += made
            left = self._left[told] - made
            self._left[told] = left
            self._decoding[told] = True
            emit = self._emit
            for slot in told.tolist():
                emit[slot](ended_unix_s)
            if drafted is not None:
                self._accepted(slots, drafted, emitted - 1, ended_unix_s)
            if self._thinkers:
                answering = self._answering(told, made)
            for slot in told[left == 0].tolist():
                why = self._requests[slot].reason.value
                ended.append((slot, why))
                overs.append(self._over(slot, why))
        for slot, why in sorted(running.ending):
            ended.append((slot, why))
            overs.append(self._over(slot, why))
        self._ack_seq += 1
        ack = PlanAck(
            replica=plan.replica,
            incarnation=plan.incarnation,
            epoch=plan.epoch,
            plan_seq=plan.seq,
            ack_seq=self._ack_seq,
            slots=plan.slots if not running.skipped else pack(slots),
            computed=pack(running.tokens),
            emitted=pack(emitted),
            ended=ended,
            preempted=plan.preempted,
            relegated=plan.relegated,
            promoted=plan.promoted,
            skipped=running.skipped,
            drafted=pack(drafted) if drafted is not None and drafted.any() else b"",
            answering=pack([slot for slot, _ in answering]) if answering else b"",
            thinking_tokens=pack([tokens for _, tokens in answering]) if answering else b"",
            started_unix_s=started_unix_s,
            ended_unix_s=ended_unix_s,
            exec_s=exec_s,
            idle_s=idle_s,
        )
        return ack, overs

    def _accepted(self, slots: Ints, drafted: Ints, accepted: Ints, at_unix_s: float) -> None:
        """Tokens that were accepted together come at one instant."""
        self.counters.drafted += int(drafted.sum())
        self.counters.accepted += int(accepted[drafted > 0].sum())
        self.counters.verifications += int(np.count_nonzero(drafted))
        more = (drafted > 0) & (accepted > 0)
        for slot, count in zip(slots[more].tolist(), accepted[more].tolist(), strict=True):
            self._requests[slot].times.extend([at_unix_s] * count)

    def _answering(self, told: Ints, made: Ints) -> list[tuple[int, int]]:
        """Whose thinking is over with these tokens, and after how many."""
        left = self._thinking[told] - made
        self._thinking[told] = left
        found = []
        for slot in told[left <= 0].tolist():
            request = self._requests[slot]
            request.thinking_tokens = len(request.times) + int(self._thinking[slot])
            found.append((slot, request.thinking_tokens))
            self._thinking[slot] = NEVER
        self._thinkers -= len(found)
        return found

    def _over(self, slot: int, why: str) -> AttemptOver:
        request = self._requests.pop(slot)
        record = request.record
        if record.slo.thinks and request.thinking_tokens is None:
            self._thinking[slot], self._thinkers = NEVER, self._thinkers - 1
        self._here[slot], self._computed[slot], self._emit[slot] = False, 0, _nobody
        measure = measured(
            request.times, record.slo, record.arrived_unix_s, request.thinking_tokens
        )
        return AttemptOver(
            key=record.key,
            attempt=record.attempt,
            replica=self._announce.replica,
            incarnation=self._announce.incarnation,
            why=why,
            relegated=request.relegated or why == "relegated",
            service_class=request.service_class,
            resume=Resume(tokens=bytes(4 * measure.tokens), measure=measure),
        )

    def _set_class(self, slots: bytes, service_class: ServiceClass) -> None:
        for slot in unpack_list(slots) if slots else ():
            request = self._requests.get(slot)
            if request is not None:
                request.service_class = service_class
                request.relegated = request.relegated or service_class is ServiceClass.BEST_EFFORT

    def check(self) -> None:
        """Raises AssertionError unless the columns balance."""
        held = np.flatnonzero(self._here)
        assert set(held.tolist()) == set(self._requests)
        peak = self._computed.copy()
        if self._running is not None:
            peak[self._running.slots] += self._running.fills
        blocks = -(-peak // self._announce.block_tokens)
        assert int(blocks.sum()) <= self._announce.kv_blocks, "KV beyond capacity"
        assert (self._computed[held] <= self._known[held]).all() and (self._left[held] > 0).all()
        for slot, request in self._requests.items():
            assert self._known[slot] == request.record.prompt_tokens + len(request.times), (
                "tokens without an instant"
            )


def measured(
    times: "array[float]", slo: Slo, arrived_unix_s: float, thinking_tokens: int | None = None
) -> Measure:
    """What Measure.emit, token by token, would have come to."""
    if not times:
        return Measure.begin(slo, arrived_unix_s)
    at, due = np.frombuffer(times), slo.first_due_unix_s(arrived_unix_s)
    thinking = (
        0
        if not slo.thinks
        else len(at)
        if thinking_tokens is None
        else min(thinking_tokens, len(at))
    )
    # the first, then the steps from each token to the next
    dues = np.full(len(at) + 1, slo.pace_s(False))
    dues[1 : thinking if thinking_tokens is not None else thinking + 1] = slo.pace_s(True)
    dues[0] = due if due < float("inf") else at[0]
    dues = np.add.accumulate(dues)
    return Measure(
        tokens=len(at),
        first_unix_s=float(at[0]),
        last_unix_s=float(at[-1]),
        next_due_unix_s=float(dues[-1]),
        worst_tbt_s=float(np.diff(at).max(initial=0.0)),
        late_tokens=int(np.count_nonzero(at > dues[:-1] + 1e-9)),
        thinking_tokens=thinking_tokens,
        thought_unix_s=float(at[thinking - 1]) if thinking else 0.0,
    )


def _shape(has: Ints, tokens: Ints, decodes: NDArray[np.bool_]) -> BatchShape:
    prefill = ~decodes
    l_in, l_has = tokens[prefill].tolist(), has[prefill].tolist()
    shape = BatchShape(
        sum(l_in),
        len(l_in),
        float(sum(n * n for n in l_in)),
        float(sum(n * cached for n, cached in zip(l_in, l_has, strict=True))),
        sum(l_has),
        len(tokens) - len(l_in),
        int(has[decodes].sum()),
    )
    return shape.with_drafts(tokens[decodes] - 1, has[decodes])


def _nobody(at_unix_s: float) -> None:
    raise AssertionError(f"a token of nobody at {at_unix_s} s")
