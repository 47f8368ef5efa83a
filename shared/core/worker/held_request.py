"""A request as its worker holds it: its prompt, its output so far, and its forms for others.

The request computes its next work, takes what the engine did, and writes itself down as an offer,
a snapshot entry or the end of an attempt. Which plan runs it, and which KV blocks it takes, is
decided elsewhere (services/worker/core/worker.py, services/worker/core/holdings.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from shared.columns import pack, unpack_list
from shared.core.offer import offer_of
from shared.core.record.record import FINAL
from shared.core.worker.step import Load, Outgoing, TurnDone, Work
from shared.measure import Measure
from shared.policy.need import Pace
from shared.prefix import salt_of
from shared.request_timeline import RequestTimeline
from shared.schemas import (
    AttemptOver,
    Body,
    Delta,
    Held,
    KvAt,
    Record,
    Resume,
    ResyncEntry,
    Sampling,
    SnapshotEntry,
    Status,
    TokenLogprob,
)
from shared.text import thinking
from shared.vocabulary import FinishReason, ReplicaId, RequestKey, ServiceClass, Slot


@dataclass(slots=True)
class HeldRequest:
    slot: int
    record: Record
    sampling: Sampling
    adapter: str
    prompt: Sequence[int]
    resumed: int  # tokens made by earlier attempts
    tokens: list[int]  # all output, all attempts
    text: str
    logprobs: list[TokenLogprob]  # along `tokens`, if asked for
    measure: Measure
    service_class: ServiceClass
    relegated: bool
    seed: int
    stops: frozenset[int]
    end_of_thinking: int | None  # the token that ends thinking; None: the model has none
    thinks_for: int | None  # number of thinking tokens, where that is known beforehand
    keep_s: float  # that its KV stays longer than others once it has ended
    kv_tokens: int = 0  # first positions whose KV came from another replica
    computed: int = 0  # KV positions filled
    had: int = 0  # positions that were filled when its KV left; they may be fetched
    drafted: int = 0  # positions filled in the draft model's KV
    # tokens of the prompt found in a prefix cache when it was first computed
    cached_tokens: int = 0
    begun: bool = False  # something of its prompt was computed, here or in an earlier attempt
    loaded: bool = False  # engine and speaker know it
    pending_end: str = ""  # why it ends at the next boundary between iterations; empty: it goes on
    message: str = ""

    @classmethod
    def begin(
        cls,
        slot: int,
        record: Record,
        body: Body,
        *,
        eos_token_ids: frozenset[int],
        end_of_thinking: int | None,
        keep_s: float,
        kv_tokens: int,
    ) -> "HeldRequest":
        resume = record.resume
        tokens = unpack_list(resume.tokens)
        sampling, prompt = body.sampling, unpack_list(body.prompt)
        ends = frozenset() if sampling.ignore_eos else eos_token_ids
        return cls(
            slot=slot,
            record=record,
            sampling=sampling,
            adapter=body.adapter,
            prompt=prompt,
            resumed=len(tokens),
            tokens=tokens,
            text=resume.text,
            logprobs=list(resume.logprobs),
            cached_tokens=resume.cached_tokens,
            begun=resume.begun,
            measure=resume.measure if tokens else Measure.begin(record.slo, record.arrived_unix_s),
            service_class=record.service_class,
            relegated=record.relegated,
            seed=seed_of(record.key, sampling),
            stops=frozenset(sampling.stop_token_ids) | ends,
            end_of_thinking=end_of_thinking,
            thinks_for=_thinks_for(sampling, prompt, end_of_thinking),
            keep_s=keep_s,
            kv_tokens=kv_tokens,
        )

    @property
    def known_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def decodes(self) -> bool:
        """True if all but its newest token is computed."""
        return len(self.tokens) > 0 and self.known_tokens - self.computed == 1

    # ------------------------------------------------------------ the next iteration

    def work(self, cap: int, draft_depth: int, context_tokens: int) -> Work:
        """The request's work in the next iteration: at most `cap` positions. Only a decode drafts,
        and never past its own end; a chunk is cut to what is left.
        """
        left = self.known_tokens - self.computed  # 1 for a decode
        limit, reason = self._limit(context_tokens)
        speculates = draft_depth > 0 and self.decodes
        tokens = min(cap, limit) if speculates else min(cap, left)
        return Work(Slot(self.slot), tokens, tokens >= left, limit, reason, self.stops)

    def _limit(self, context_tokens: int) -> tuple[int, FinishReason]:
        """The number of tokens that it may still make, and the name of its end when it has made
        them.
        """
        made = len(self.tokens)
        room = context_tokens - len(self.prompt) - made
        # the record's maximum may be less than was asked for: the planner counts to that
        limit = min(self.sampling.max_tokens - made, self.record.max_tokens - made, room)
        scripted = self.sampling.output_tokens
        if scripted is not None and scripted - made <= limit:
            return scripted - made, FinishReason.STOP
        return limit, FinishReason.LENGTH

    def pace(self) -> Pace:
        """The pace that the request must keep, and how far it is."""
        slo, measure = self.record.slo, self.measure
        return Pace(
            tbt_s=slo.pace_s(measure.thinking(slo)),
            last_due_unix_s=slo.last_due_unix_s(self.record.arrived_unix_s),
            first_token_unix_s=measure.first_unix_s if measure.tokens else math.inf,
            generated_tokens=len(self.tokens),
            max_tokens=self.record.max_tokens,
            best_effort=self.service_class is ServiceClass.BEST_EFFORT,
        )

    def load(self) -> Load:
        """The request as an engine takes it in."""
        return Load(
            Slot(self.slot),
            [*self.prompt, *self.tokens],
            len(self.tokens),
            self.sampling,
            self.seed,
            self.adapter,
            Resume(tokens=pack(self.tokens), text=self.text),
            salt_of(self.record.salt, self.adapter),
            self.keep_s,
        )

    # ------------------------------------------------------------ after an iteration

    def take_first_chunk(self, did: TurnDone) -> None:
        """Take the cached tokens of the first iteration that computes something of its prompt.

        OpenAI's `cached_tokens` are the tokens of the prompt that were found in the cache when it
        first was computed. What is found after a preemption or a move is no saving of the caller's:
        the request may have computed it itself.
        """
        if did.computed:
            self.begun, self.cached_tokens = True, did.cached

    def extend(self, did: TurnDone, at_unix_s: float) -> int | None:
        """Take the tokens of an iteration. Returns the number of thinking tokens if thinking is
        over with them, else None.
        """
        self.tokens.extend(did.tokens)
        self.text += did.text
        self.logprobs.extend(did.logprobs)
        thinking_tokens = self._thinking_tokens(did.tokens)
        self.measure = self.measure.emit(
            len(did.tokens), at_unix_s, self.record.slo, thinking_tokens
        )
        return thinking_tokens

    def _thinking_tokens(self, newest: Sequence[int]) -> int | None:
        """The number of thinking tokens, if the newest tokens show it. None if the request still
        thinks, or if the number was known before.
        """
        if not newest or not self.measure.thinking(self.record.slo):
            return None
        if self.thinks_for is not None:
            return self.thinks_for if len(self.tokens) >= self.thinks_for else None
        if self.end_of_thinking not in newest:
            return None
        before = len(self.tokens) - len(newest)
        return before + newest.index(self.end_of_thinking) + 1

    def relegate(self) -> None:
        self.service_class = ServiceClass.BEST_EFFORT
        self.relegated = True

    def promote(self) -> None:
        self.service_class = ServiceClass.STANDARD

    # ------------------------------------------------------------ messages about the request

    def delta(self, did: TurnDone) -> Outgoing:
        """The client's event with what the iteration made; built before `extend`."""
        record = self.record
        delta = Delta(
            attempt=record.attempt,
            offset=len(self.tokens),
            tokens=list(did.tokens),
            text=did.text,
            text_offset=len(self.text),
            finish_reason=did.finish,
            logprobs=list(did.logprobs),
        )
        return Outgoing(record.stream_subject, record.json, delta)

    def status(self, state: str, service_class: ServiceClass, replica: ReplicaId) -> Outgoing:
        """The client's event of a class change."""
        record = self.record
        status = Status(
            state=state, service_class=service_class, attempt=record.attempt, replica=replica
        )
        return Outgoing(record.stream_subject, record.json, status)

    def held(self, at_unix_s: float) -> Held:
        """The entry of the ack log about the hold."""
        return Held(
            slot=self.slot,
            key=self.record.key,
            attempt=self.record.attempt,
            offset=len(self.tokens),
            text_offset=len(self.text),
            tier=self.record.tier,
            at_unix_s=at_unix_s,
            best_effort=self.service_class is ServiceClass.BEST_EFFORT,
        )

    def snapshot_entry(self, timeline: RequestTimeline) -> SnapshotEntry:
        """The whole output so far, from offset 0."""
        return SnapshotEntry(
            held=Held(
                slot=self.slot,
                key=self.record.key,
                attempt=self.record.attempt,
                offset=0,
                text_offset=0,
                tier=self.record.tier,
            ),
            tokens=pack(self.tokens),
            text=self.text,
            measure=self.measure,
            service_class=self.service_class,
            relegated=self.relegated,
            logprobs=list(self.logprobs),
            cached_tokens=self.cached_tokens if self.begun else None,
            diary=timeline,
        )

    def resync_entry(self) -> ResyncEntry:
        """The request as a planner takes it over, between iterations."""
        offer = offer_of(self.record, self.service_class, self.measure, self.resumed)
        return ResyncEntry(
            slot=self.slot,
            offer=replace(offer, kv_tokens=self.kv_tokens),
            computed_tokens=self.computed,
            generated_tokens=len(self.tokens),
            draft_tokens=self.drafted,
        )

    def over(
        self,
        why: str,
        replica: ReplicaId,
        incarnation: str,
        timeline: RequestTimeline,
        kv_address: str,
    ) -> AttemptOver:
        """The message about this attempt's end, with all that the next attempt needs. `kv_address`:
        where its KV can be fetched; empty: nowhere.
        """
        goes_on = kv_address and self.had and why not in FINAL
        return AttemptOver(
            key=self.record.key,
            attempt=self.record.attempt,
            replica=replica,
            incarnation=incarnation,
            why=why,
            relegated=self.relegated or why == "relegated",
            service_class=self.service_class,
            resume=Resume(
                tokens=pack(self.tokens),
                text=self.text,
                measure=self.measure,
                logprobs=self.logprobs,
                cached_tokens=self.cached_tokens,
                diary=timeline,
            ),
            message=self.message,
            kv=KvAt(replica=replica, address=kv_address, tokens=self.had) if goes_on else None,
        )

    def check(self) -> None:
        """Raises AssertionError if more is computed than is known, or a token was not measured."""
        assert 0 <= self.computed <= max(self.known_tokens - 1, len(self.prompt)), (
            "computed beyond what is known"
        )
        assert self.measure.tokens == len(self.tokens), "tokens without a measure"


def seed_of(key: RequestKey, sampling: Sampling) -> int:
    """The seed of a request's draws: its own, or one from its key (FNV-1a). A request that moves to
    another replica draws the same tokens there.
    """
    if sampling.seed is not None:
        return sampling.seed
    value = 0xCBF29CE484222325
    for byte in key.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value >> 1


def _thinks_for(
    sampling: Sampling, prompt: Sequence[int], end_of_thinking: int | None
) -> int | None:
    """The number of output tokens that are thinking, if it is known before the first token. A chat
    template that does not want thinking ends it in the prompt.
    """
    if sampling.thinking_tokens is not None:
        return sampling.thinking_tokens
    return 0 if thinking.ended(prompt, end_of_thinking) else None
