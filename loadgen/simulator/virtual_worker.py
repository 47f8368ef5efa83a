"""A worker and its engine in virtual time: it runs plans as a WorkerCore does, over columns of all
slots, so that the cost hardly grows with the batch.

A virtual worker decides nothing. Plans say what runs, the profiles of target and draft say how long
it takes, the acceptance model says which drafts are kept. tests/fleet/protocol/ compares it with
the real WorkerCore. There are no texts and no token ids: an output is the instants of its tokens,
and its measure is computed from them at the end.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from loadgen.simulator.iteration.drafting import Drafting, Requests
from loadgen.simulator.iteration.held import Counters, HeldRequest
from loadgen.simulator.iteration.luck import Luck
from loadgen.simulator.iteration.prefixes import Prefixes
from loadgen.simulator.iteration.running import Found, Running
from loadgen.simulator.misjudged import BatchTime
from loadgen.simulator.token_times import measured
from shared.columns import Indices, Ints, pack, unpack, unpack_list
from shared.core.record.record import FINAL
from shared.core.replica.events import DraftedIteration
from shared.core.replica.in_flight import shape_of
from shared.core.worker.held_request import seed_of
from shared.perf.draft import Draft
from shared.policy.acceptance import Acceptance, drafting_depth
from shared.policy.need import Paces
from shared.policy.seam import Bools, Floats
from shared.policy.speculation import along
from shared.prefix import Chain, pack_hashes
from shared.schemas import (
    Announce,
    AttemptOver,
    BatchPlan,
    Body,
    Hold,
    KvAt,
    PlanAck,
    Record,
    Resume,
    Selection,
)
from shared.vocabulary import HANDED_OVER, FinishReason, ServiceClass

NEVER = 1 << 30  # tokens: longer than any output


class VirtualWorker:
    """One replica's worker. Columns are indexed by slot."""

    def __init__(
        self, announce: Announce, batch_s: BatchTime, draft: Draft | None, acceptance: Acceptance
    ) -> None:
        self._announce = announce
        self._batch_s, self._draft = batch_s, draft
        self._luck = Luck(acceptance, announce.max_slots)
        self.counters = Counters()
        self._queue: deque[BatchPlan] = deque()
        self._running: Running | None = None
        self._requests: dict[int, HeldRequest] = {}
        self._next_seq, self._ack_seq, slots = 1, 0, announce.max_slots
        self._here = np.zeros(slots, dtype=np.bool_)
        self._prompt: Ints = np.zeros(slots, dtype=np.int32)
        self._known: Ints = np.zeros(slots, dtype=np.int32)  # prompt and output tokens
        self._computed: Ints = np.zeros(slots, dtype=np.int32)
        self._drafted: Ints = np.zeros(slots, dtype=np.int32)  # positions filled in the draft's KV
        self._left: Ints = np.zeros(slots, dtype=np.int32)  # output tokens until it ends
        # output tokens until its thinking ends
        self._thinking: Ints = np.full(slots, NEVER, dtype=np.int32)
        self._thinkers = 0  # slots whose request still thinks
        # the request has emitted a token since its KV was last filled from nothing
        self._decoding = np.zeros(slots, dtype=np.bool_)
        # of shared/policy/need.py; when token 1 came is looked up for the first need
        self._pace_s: Floats = np.zeros(slots)
        self._last_due_unix_s: Floats = np.zeros(slots)
        self._first_unix_s: Floats = np.zeros(slots)
        self._max_tokens: Ints = np.zeros(slots, dtype=np.int32)
        self._best_effort: Bools = np.zeros(slots, dtype=np.bool_)
        self._emit: list[Callable[[float], None]] = [_no_request] * slots
        self.prefixes = Prefixes(announce, self._computed)

    @property
    def running(self) -> bool:
        return self._running is not None

    @property
    def held(self) -> int:
        return len(self._requests)

    def hold(
        self, hold: Hold, record: Record, body: Body, times: "array[float]", chain: Chain = ()
    ) -> None:
        """Take a request in. `times` has the instants of the tokens of earlier attempts, and
        receives those to come. `chain`: of its prompt and its output; one without shares nothing.
        """
        assert hold.attempt == record.attempt and not self._here[hold.slot], f"slot {hold.slot}"
        measure, sampling = record.resume.measure, body.sampling
        made = measure.tokens
        assert made == len(times)
        room = self._announce.context_tokens - record.prompt_tokens
        left, reason = min(sampling.max_tokens, room) - made, FinishReason.LENGTH.value
        if sampling.output_tokens is not None and sampling.output_tokens - made <= left:
            left, reason = sampling.output_tokens - made, FinishReason.STOP.value
        if record.then is not None and left > 1:
            left, reason = 1, HANDED_OVER
        slot = hold.slot
        self._requests[slot] = HeldRequest(
            record, times, reason, record.service_class, record.relegated, measure.thinking_tokens
        )
        thinks = measure.thinking(record.slo)
        # thinking ends after a count of tokens: no token here has a meaning
        self._thinking[slot] = (sampling.thinking_tokens or 0) - made if thinks else NEVER
        self._thinkers += thinks
        self._here[slot], self._decoding[slot] = True, False
        self._prompt[slot] = record.prompt_tokens
        self._luck.begin(slot, seed_of(record.key, sampling) % (1 << 64))
        self._known[slot] = record.prompt_tokens + made
        self._computed[slot] = self._drafted[slot] = 0
        self._left[slot] = left
        self._pace_s[slot] = record.slo.pace_s(thinks)
        self._last_due_unix_s[slot] = record.slo.last_due_unix_s(record.arrived_unix_s)
        self._first_unix_s[slot] = math.inf
        self._max_tokens[slot] = record.max_tokens
        self._best_effort[slot] = record.service_class is ServiceClass.BEST_EFFORT
        self._emit[slot] = times.append
        self.prefixes.hold(slot, chain, record, hold.keep_s)

    def plan(self, plan: BatchPlan) -> None:
        assert plan.seq == self._next_seq, f"plan {plan.seq} came for {self._next_seq}"
        self._next_seq += 1
        self._queue.append(plan)

    def begin(self, now_unix_s: float) -> float | None:
        """Begin the next plan. Returns the seconds it takes, or None if there is no plan. A plan
        that only releases takes 0 s.
        """
        assert self._running is None
        if not self._queue:
            return None
        plan = self._queue.popleft()
        ending: list[tuple[int, str]] = []
        if plan.released:
            released = zip(unpack_list(plan.released), plan.released_why, strict=True)
            ending = [(slot, why) for slot, why in released if self._here[slot]]
        for slot in unpack_list(plan.preempted) if plan.preempted else ():
            self.prefixes.clear(slot, now_unix_s)
            self._drafted[slot], self._decoding[slot] = 0, False
        self.prefixes.forget(now_unix_s)
        for slot, _ in ending:  # their KV is free before the entries run
            self._requests[slot].had = int(self._computed[slot])
            self.prefixes.clear(slot, now_unix_s)
        self._set_class(plan.relegated, ServiceClass.BEST_EFFORT)
        self._set_class(plan.promoted, ServiceClass.STANDARD)
        slots, caps = unpack(plan.slots).astype(np.intp), unpack(plan.caps)
        gone, skipped = ~self._here[slots], b""
        if ending:
            gone |= np.isin(slots, [slot for slot, _ in ending])
        if np.count_nonzero(gone):
            skipped = pack(slots[gone])
            slots, caps = slots[~gone], caps[~gone]
        selection, found = plan.selection, None
        if selection is not None and skipped:
            selection = along(selection, np.flatnonzero(~gone).tolist())
        if self.prefixes.any:
            found = self._find(slots, caps, selection)
        loaded_s = 0.0
        if found is not None:
            slots, caps, loaded_s = slots[found.runs], caps[found.runs], found.loaded_s
            selection = found.of(selection)
        if selection is not None and len(slots):
            drafting = self._drafting(selection, slots, caps)
            exec_s = drafting.begin(now_unix_s) + loaded_s
            self._drafted[slots] = drafting.did.filled
            self._running = Running.drafting_now(plan, slots, drafting, skipped, ending, found)
            return exec_s
        has = self._computed[slots]
        wanted = self._known[slots] - has
        tokens: Ints = np.minimum(caps, wanted)
        decodes, emits = self._decoding[slots], tokens >= wanted
        shape = shape_of(has, tokens, decodes)
        alike = np.count_nonzero(emits) == shape.decodes and not (ending or skipped or found)
        alike = alike and not self.prefixes.leaving(slots[~decodes])  # each chunk leaves by itself
        self._running = Running(
            plan, slots, tokens, tokens, emits, None, skipped, shape, ending, alike, found
        )
        return self._batch_s(shape) + loaded_s

    def _find(self, slots: Indices, caps: Ints, selection: Selection | None) -> Found | None:
        """Lets the entries of a plan that begin share what others computed."""
        known = self._known[slots]
        left = known - self._computed[slots]
        asked: Ints = np.minimum(caps, left)
        if selection is not None:
            drafts = drafting_depth(selection, left, known - self._prompt[slots]) > 0
            asked = np.where(drafts, np.minimum(caps, self._left[slots]), asked)
        return self.prefixes.find(slots, known, asked)

    def _drafting(self, selection: Selection, slots: Indices, caps: Ints) -> Drafting:
        assert self._draft is not None, "speculation without a draft model"
        for slot in slots[np.isinf(self._first_unix_s[slots])].tolist():
            if times := self._requests[slot].times:
                self._first_unix_s[slot] = times[0]
        known, has = self._known[slots], self._computed[slots]
        requests = Requests(
            has,
            known - has,
            self._left[slots],
            self._drafted[slots],
            self._decoding[slots],
            Paces(
                self._pace_s[slots],
                self._last_due_unix_s[slots],
                self._first_unix_s[slots],
                known - self._prompt[slots],
                self._max_tokens[slots],
                self._best_effort[slots],
            ),
        )
        trees = partial(self._luck.draft, slots)
        chain = self._announce.longest_chain
        return Drafting(self._draft, self._batch_s, trees, selection, caps, requests, chain)

    @property
    def worked(self) -> bool:
        """True if the iteration under way computes anything."""
        assert self._running is not None
        return len(self._running.slots) > 0

    @property
    def drafts(self) -> bool:
        """Requests draft in the iteration under way."""
        return self._running is not None and self._running.drafting is not None

    # ------------------------------------------------------------ leaps

    def alike(self, most: int) -> list[float]:
        """The seconds of the iteration under way and of those after it that are alike but for
        their contexts, at most `most` in all. No prefill ends in them; a stage or a request ends in
        the last at most. Contexts grow by what each entry computes, so the shapes are known.
        """
        running = self._running
        assert running is not None
        if most < 2 or not running.alike or not len(running.slots):
            return []
        emitting = running.slots[running.emits]
        steps = most
        if len(emitting):
            left = np.minimum(self._left[emitting], self._thinking[emitting])
            steps = min(most, int(left.min()))
        if running.shape.prefills:
            chunks, tokens = running.slots[~running.emits], running.tokens[~running.emits]
            steps = min(
                steps, int(((self._known[chunks] - self._computed[chunks] - 1) // tokens).min())
            )
        return [self._batch_s(running.shape_after(n)) for n in range(steps)]

    def leap(self, ends_unix_s: Sequence[float], exec_s: float) -> None:
        """The iteration under way has ended at each of these instants and begun again. It has
        computed for `exec_s` in all.
        """
        running = self._running
        assert running is not None
        n, emitting = len(ends_unix_s), running.slots[running.emits]
        self._computed[running.slots] += n * running.tokens
        if self.prefixes.any:
            self.prefixes.name(running.slots, self._decoding)
        self._known[emitting] += n
        self._left[emitting] -= n
        self._thinking[emitting] -= n
        instants = array("d", ends_unix_s)
        for slot in emitting.tolist():
            self._requests[slot].times.extend(instants)
        self.counters.iterations += n
        self.counters.tokens += n * len(emitting)
        self.counters.exec_s += exec_s
        self._running = running._replace(shape=running.shape_after(n))

    def again(self, now_unix_s: float, exec_s: float) -> float | None:
        """The iteration under way ends, in which decodes draft, and one that is alike begins.
        Returns the next one's seconds; None if none follows: a request or a stage ends.
        """
        running = self._running
        assert running is not None
        if running.drafting is None or running.ending or running.skipped:
            return None
        return running.drafting.again(now_unix_s, exec_s, lambda: self._spare(running))

    def _spare(self, running: Running) -> Ints:
        """The tokens that each entry may make before an iteration that is no longer alike."""
        slots, caps = running.slots, unpack(running.plan.caps)
        ends = np.minimum(self._left[slots], self._thinking[slots]) - 1
        # near its maximum the planner lets it draft less
        made = self._known[slots] - self._prompt[slots]
        spare: Ints = np.minimum(ends, self._max_tokens[slots] - made - np.maximum(caps, 2))
        return spare

    def settle(self) -> Sequence[DraftedIteration]:
        """Write down the iterations that `again` has ended."""
        running = self._running
        if running is None or running.drafting is None or not running.drafting.ran:
            return ()
        drafting, slots, counters = running.drafting, running.slots, self.counters
        ran, drafting.ran = drafting.ran, []
        drafted, kept = (np.array([each[column] for each in ran]) for column in (-2, -1))
        ends_unix_s = np.array([each.ended_unix_s for each in ran])
        for slot, tokens in zip(slots.tolist(), kept.T, strict=True):
            self._requests[slot].times.frombytes(ends_unix_s.repeat(tokens).tobytes())
        made = kept.sum(axis=0, dtype=np.int32)
        self._computed[slots] += made
        self._known[slots] += made
        self._left[slots] -= made
        self._thinking[slots] -= made
        self._drafted[slots] = drafting.did.filled
        counters.iterations += len(ran)
        counters.tokens += int(made.sum())
        for each in ran:
            counters.exec_s += each.exec_s
        self._count_drafts(drafted, kept - 1)
        self._running = Running.drafting_now(running.plan, slots, drafting)
        return ran

    # ------------------------------------------------------------ ends

    def lose(self, why: str = "") -> list[AttemptOver]:
        """The process ends, for `why` if it drains: the running iteration is lost. Returns the
        attempts as logged.
        """
        self._running = None
        self._queue.clear()
        return [self._over(slot, why) for slot in list(self._requests)]

    def finish(
        self, *, started_unix_s: float, ended_unix_s: float, exec_s: float, idle_s: float
    ) -> tuple[PlanAck, list[AttemptOver]]:
        """The iteration under way has ended. Returns its ack, and the attempts that are over."""
        running = self._running
        assert running is not None
        self._running = None
        plan, slots, emits = running.plan, running.slots, running.emits
        drafted = None if running.drafting is None else running.drafting.did.drafted
        emitted = emits.astype(np.int32)
        # a speculating entry keeps its root and emits a token for each position that it keeps
        if drafted is not None:
            emitted = np.where(drafted > 0, running.tokens, emitted)
        answering: list[tuple[int, int]] = []
        ended: list[tuple[int, str]] = []
        if len(slots):
            self.counters.iterations += 1
            self.counters.exec_s += exec_s
            self.counters.idle_s += idle_s
            complete, answering = self._advance(running, emitted, drafted, ended_unix_s)
            ended = [(slot, self._requests[slot].reason) for slot in complete]
        ended += sorted(running.ending)
        shared_blocks, tokens, cached = self.prefixes.shared_blocks, running.tokens, b""
        found, loaded_s = running.found, 0.0
        if found is not None:
            columns, loaded_s = found.columns(tokens, emitted, drafted), found.loaded_s
            slots, tokens, emitted, drafted, cached = columns
        overs = [self._over(slot, why) for slot, why in ended]
        self._ack_seq += 1
        prefixes = self.prefixes.changes()
        ack = PlanAck(
            replica=plan.replica,
            incarnation=plan.incarnation,
            epoch=plan.epoch,
            plan_seq=plan.seq,
            ack_seq=self._ack_seq,
            slots=plan.slots if not running.skipped else pack(slots),
            computed=pack(tokens),
            emitted=pack(emitted),
            ended=ended,
            preempted=plan.preempted,
            relegated=plan.relegated,
            promoted=plan.promoted,
            skipped=running.skipped,
            drafted=pack(drafted) if drafted is not None and drafted.any() else b"",
            cached=cached,
            shared_blocks=shared_blocks,
            answering=pack([slot for slot, _ in answering]) if answering else b"",
            thinking_tokens=pack([tokens for _, tokens in answering]) if answering else b"",
            started_unix_s=started_unix_s,
            ended_unix_s=ended_unix_s,
            exec_s=exec_s,
            idle_s=idle_s,
            loaded_s=loaded_s,
            kept=pack_hashes(prefixes.kept),
            moved=pack_hashes(prefixes.moved),
            dropped=pack_hashes(prefixes.dropped),
        )
        return ack, overs

    def _advance(
        self, running: Running, emitted: Ints, drafted: Ints | None, at_unix_s: float
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Give the tokens of the iteration to their requests. Returns the slots whose output is
        complete, and those whose thinking ends with their numbers of thinking tokens.
        """
        slots, emits = running.slots, running.emits
        self._computed[slots] += running.tokens
        emitting = slots[emits]
        made = emitted if len(emitting) == len(slots) else emitted[emits]
        self.counters.tokens += int(made.sum())
        self._known[emitting] += made
        left = self._left[emitting] - made
        self._left[emitting] = left
        self._decoding[emitting] = True
        if self.prefixes.any:
            self.prefixes.name(slots, self._decoding)
        emit = self._emit
        for slot in emitting.tolist():
            emit[slot](at_unix_s)
        if drafted is not None:
            self._accepted(slots, drafted, emitted - 1, at_unix_s)
        answering = self._answering(emitting, made) if self._thinkers else []
        return emitting[left == 0].tolist(), answering

    def _accepted(self, slots: Indices, drafted: Ints, accepted: Ints, at_unix_s: float) -> None:
        """Write down tokens that were accepted together: they come at one instant."""
        self._count_drafts(drafted, accepted)
        more = (drafted > 0) & (accepted > 0)
        for slot, count in zip(slots[more].tolist(), accepted[more].tolist(), strict=True):
            self._requests[slot].times.extend([at_unix_s] * count)

    def _count_drafts(self, drafted: Ints, accepted: Ints) -> None:
        self.counters.drafted += int(drafted.sum())
        self.counters.accepted += int(accepted[drafted > 0].sum())
        self.counters.verifications += int(np.count_nonzero(drafted))

    def _answering(self, emitting: Indices, made: Ints) -> list[tuple[int, int]]:
        """The slots whose thinking ends with these tokens, and their numbers of thinking tokens."""
        left = self._thinking[emitting] - made
        self._thinking[emitting] = left
        found = []
        for slot in emitting[left <= 0].tolist():
            request = self._requests[slot]
            request.thinking_tokens = len(request.times) + int(self._thinking[slot])
            found.append((slot, request.thinking_tokens))
            self._thinking[slot] = NEVER
            self._pace_s[slot] = request.record.slo.pace_s(False)
        self._thinkers -= len(found)
        return found

    def _over(self, slot: int, why: str) -> AttemptOver:
        request = self._requests.pop(slot)
        record = request.record
        if record.slo.thinks and request.thinking_tokens is None:
            self._thinking[slot], self._thinkers = NEVER, self._thinkers - 1
        address, had = self._announce.kv_address, request.had or int(self._computed[slot])
        goes_on = address and had and why not in FINAL
        cached_tokens = self.prefixes.leave(slot)
        self._here[slot], self._emit[slot] = False, _no_request
        made = request.times, record.slo, record.arrived_unix_s, request.thinking_tokens
        measure = measured(*made)
        return AttemptOver(
            key=record.key,
            attempt=record.attempt,
            replica=self._announce.replica,
            incarnation=self._announce.incarnation,
            why=why,
            relegated=request.relegated or why == "relegated",
            service_class=request.service_class,
            resume=Resume(
                tokens=bytes(4 * measure.tokens), measure=measure, cached_tokens=cached_tokens
            ),
            kv=KvAt(replica=self._announce.replica, address=address, tokens=had)
            if goes_on
            else None,
        )

    def _set_class(self, slots: bytes, service_class: ServiceClass) -> None:
        for slot in unpack_list(slots) if slots else ():
            request = self._requests.get(slot)
            if request is not None:
                request.service_class = service_class
                self._best_effort[slot] = service_class is ServiceClass.BEST_EFFORT
                request.relegated = request.relegated or service_class is ServiceClass.BEST_EFFORT

    def check(self) -> None:
        """Raises AssertionError unless the columns balance."""
        held = np.flatnonzero(self._here)
        assert set(held.tolist()) == set(self._requests)
        peak = self._computed.copy()
        if self._running is not None:
            peak[self._running.slots] += self._running.fills
        self.prefixes.check(peak)
        assert (self._computed[held] <= self._known[held]).all() and (self._left[held] > 0).all()
        for slot, request in self._requests.items():
            assert self._known[slot] == request.record.prompt_tokens + len(request.times), (
                "tokens without an instant"
            )


def _no_request(at_unix_s: float) -> None:
    raise AssertionError(f"a token of no request at {at_unix_s} s")
