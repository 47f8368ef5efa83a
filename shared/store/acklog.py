"""Reads the ack log of a replica into Stories: what each attempt (a request's stay there) has made.
Recovery and attach use them.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import structlog
from msgspec.structs import replace

from shared.bus.api import Bus
from shared.columns import pack, unpack_list
from shared.core.record.record import FINAL
from shared.core.record.time_accounting import Chunk, Spent, TimeAccounting
from shared.errors import UNDECODABLE, PeerError
from shared.measure import Measure
from shared.request_timeline import Happened, RequestTimeline
from shared.schemas import (
    AttemptOver,
    Fenced,
    LogEntry,
    PlanAck,
    Record,
    Registered,
    Resume,
    Snapshot,
    TokenLogprob,
)
from shared.subjects import ack_log
from shared.vocabulary import FinishReason, ReplicaId, RequestKey, ServiceClass

log = structlog.get_logger()

FOLDED_AT_ONCE = 16  # entries of a log, before other tasks get a turn

encode_entry = msgspec.msgpack.Encoder().encode
_entry: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry)


def decode_entry(payload: bytes) -> LogEntry:
    """One entry. Raises PeerError if no worker or admission can have written it."""
    try:
        return _entry.decode(payload)
    except UNDECODABLE as error:
        raise PeerError(
            f"an entry of an ack log cannot be read: {error}", code="unreadable"
        ) from error


def decode_log(rows: Iterable[tuple[int, bytes]]) -> Iterator[LogEntry]:
    """The entries that can be read, in order."""
    for seq, payload in rows:
        try:
            yield decode_entry(payload)
        except PeerError as error:
            log.warning("entry.unreadable", seq=seq, error=error.message)


# the reasons that come from the output itself: such an end carries text even without a token
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Story:
    """One attempt on one incarnation, by the log. `offset`: tokens of earlier attempts."""

    incarnation: str
    offset: int
    text_offset: int
    tokens: list[int] = field(default_factory=list)  # from `offset` on
    text: str = ""
    measure: Measure | None = None  # from a snapshot; `emissions` are those since
    # (tokens, at_unix_s, thinking tokens if the ack has them)
    emissions: list[tuple[int, float, int | None]] = field(default_factory=list)
    ended: str = ""
    over: AttemptOver | None = None
    # of this attempt, or of all attempts where `measure` is from a snapshot
    timeline: RequestTimeline = field(default_factory=RequestTimeline)
    relegated: bool = False  # best-effort at some time
    best_effort: bool = False  # at the end of the story
    logprobs: list[TokenLogprob] = field(default_factory=list)  # parallel to `tokens`, or empty
    # of this attempt's first chunk, or from its snapshot; None if the attempt has computed nothing
    cached_tokens: int | None = None

    def resume(self, record: Record) -> Resume:
        """The resume of the next attempt: the record's own resume and this attempt's tokens; only
        the record's own if this attempt's tokens begin elsewhere or were not timed.
        """
        before = record.resume
        measure = self.measure
        if measure is None:
            measure = (
                before.measure
                if before.tokens
                else Measure.begin(record.slo, record.arrived_unix_s)
            )
        timeline = self._whole(record)
        for n, at_unix_s, thinking_tokens in self.emissions:
            after = measure.emit(n, at_unix_s, record.slo, thinking_tokens)
            if timeline.late is not None and after.late_tokens and not measure.late_tokens:
                token, due_unix_s = measure.first_late(n, at_unix_s, record.slo, thinking_tokens)
                timeline = replace(
                    timeline, late=replace(timeline.late, token=token, due_unix_s=due_unix_s)
                )
            measure = after
        tokens = unpack_list(before.tokens)[: self.offset] + self.tokens
        text = before.text[: self.text_offset] + self.text
        logprobs = before.logprobs[: self.offset] + self.logprobs
        if len(tokens) != measure.tokens:  # no worker writes such a log
            return before
        if len(logprobs) != len(tokens):  # one of the request's engines had none to give
            logprobs = []
        cached_tokens = self.cached_tokens
        if cached_tokens is None or (self.measure is None and before.begun):
            cached_tokens = before.cached_tokens
        return Resume(
            tokens=pack(tokens),
            text=text,
            measure=measure,
            logprobs=logprobs,
            cached_tokens=cached_tokens,
            diary=timeline,
        )

    def _whole(self, record: Record) -> RequestTimeline:
        """The timeline, with that of earlier attempts."""
        if self.measure is not None:
            return self.timeline
        happenings, late = self.timeline.happenings, self.timeline.late
        held_unix_s = happenings[0].at_unix_s if happenings else 0.0
        before = record.resume.diary.waited(record.arrived_unix_s, held_unix_s)
        if late is not None:
            late = replace(late, account=before.then(late.account))
        return replace(
            before.noted(*happenings),
            account=before.then(self.timeline.account),
            late=before.late or late,
        )


Stories = dict[tuple[RequestKey, int, str], Story]  # by key, attempt and incarnation


class _Folding:
    """The story of every attempt that the entries so far name."""

    def __init__(self, replica: ReplicaId) -> None:
        self._replica = replica
        self._stories: Stories = {}
        self._at_slot: dict[int, Story] = {}
        self._accounting = TimeAccounting(replica)

    def add(self, entry: LogEntry) -> None:
        match entry:
            case Registered():
                self._close()
                self._at_slot.clear()
                self._accounting = TimeAccounting(self._replica)
            case Fenced():
                pass
            case Snapshot():
                for kept in entry.entries:
                    held = kept.held
                    self._accounting.found(held, kept.diary)
                    story = self._at_slot[held.slot] = Story(
                        entry.incarnation,
                        held.offset,
                        held.text_offset,
                        unpack_list(kept.tokens),
                        kept.text,
                        kept.measure,
                        relegated=kept.relegated,
                        best_effort=kept.service_class is ServiceClass.BEST_EFFORT,
                        logprobs=list(kept.logprobs),
                        cached_tokens=kept.cached_tokens,
                    )
                    self._stories[held.key, held.attempt, entry.incarnation] = story
                for over in entry.overs:
                    made = over.resume
                    self._stories[over.key, over.attempt, entry.incarnation] = Story(
                        entry.incarnation,
                        0,
                        0,
                        unpack_list(made.tokens),
                        made.text,
                        made.measure,
                        ended=over.why,
                        over=over,
                        relegated=over.relegated,
                        best_effort=over.service_class is ServiceClass.BEST_EFFORT,
                        logprobs=list(made.logprobs),
                        cached_tokens=made.cached_tokens,
                    )
            case PlanAck():
                try:
                    _feed(entry, self._stories, self._at_slot, self._accounting)
                except ValueError as error:  # columns that do not fit: no worker writes such
                    log.warning("entry.unreadable", ack_seq=entry.ack_seq, error=str(error))

    def end(self) -> Stories:
        self._close()
        return self._stories

    def _close(self) -> None:
        """Set the timelines of attempts whose end is not in the log."""
        for slot, story in self._at_slot.items():
            story.timeline = self._accounting.timeline(slot)


async def fold_in_turns(entries: Iterable[LogEntry], replica: ReplicaId) -> Stories:
    """The story of every attempt in the entries. Other tasks get turns, since logs are long."""
    folding = _Folding(replica)
    for n, entry in enumerate(entries, 1):
        folding.add(entry)
        if n % FOLDED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return folding.end()


def _feed(
    ack: PlanAck, stories: Stories, at_slot: dict[int, Story], accounting: TimeAccounting
) -> None:
    tokens, emitted = unpack_list(ack.tokens), unpack_list(ack.emitted)
    if min(emitted, default=0) < 0 or sum(emitted) != len(tokens):
        raise ValueError("there must be as many tokens as were emitted")
    slots, computed = unpack_list(ack.slots), unpack_list(ack.computed)
    cached = unpack_list(ack.cached) or [0] * len(computed)
    if not all(0 <= found <= n for found, n in zip(cached, computed, strict=True)):
        raise ValueError("no more can be cached than was computed")
    for held in ack.held:
        story = Story(ack.incarnation, held.offset, held.text_offset)
        stories[held.key, held.attempt, ack.incarnation] = at_slot[held.slot] = story
        accounting.held(held, RequestTimeline())
    for slot in unpack_list(ack.relegated):
        if slot in at_slot:
            at_slot[slot].relegated = at_slot[slot].best_effort = True
    for slot in unpack_list(ack.promoted):
        if slot in at_slot:
            at_slot[slot].best_effort = False
    ended, answering = dict(ack.ended), unpack_list(ack.answering)
    thought = dict(zip(answering, unpack_list(ack.thinking_tokens), strict=True))
    texts, at = iter(ack.texts), 0
    firsts: list[int] = []
    logprobs, with_logprobs = iter(ack.logprobs), frozenset(unpack_list(ack.logprob_slots))
    for slot, n in zip(slots, emitted, strict=True):
        if not n and ended.get(slot) not in _OWN_ENDS:
            continue
        text = next(texts, "")
        likely = list(islice(logprobs, n)) if slot in with_logprobs else []
        attempt = at_slot.get(slot)
        if attempt is not None:  # else its hold was in an entry that could not be read
            attempt.tokens += tokens[at : at + n]
            attempt.text += text
            attempt.logprobs += likely
            attempt.emissions.append((n, ack.ended_unix_s, thought.get(slot)))
            if n and not attempt.offset and len(attempt.tokens) == n:
                firsts.append(slot)
        at += n
    for slot, n, found in zip(slots, computed, cached, strict=True):
        if n and slot in at_slot and at_slot[slot].cached_tokens is None:
            at_slot[slot].cached_tokens = found
    if ack.plan_seq:
        account(ack, firsts, accounting)
    for slot, why in ack.ended:
        if slot in at_slot:
            story = at_slot.pop(slot)
            story.ended, story.timeline = why, accounting.leave(slot)
            if why not in FINAL:
                until_unix_s = story.timeline.account.until_unix_s
                story.timeline = story.timeline.left(accounting.replica, why, until_unix_s)


def account(ack: PlanAck, firsts: Sequence[int], accounting: TimeAccounting) -> None:
    """Feed the accounting as the worker fed its own. `firsts`: slots with their first token."""
    orders = (
        (Happened.PREEMPTED, ack.preempted),
        (Happened.RELEGATED, ack.relegated),
        (Happened.PROMOTED, ack.promoted),
    )
    for what, named in orders:
        accounting.note(what, unpack_list(named), ack.started_unix_s)
    slots = unpack_list(ack.slots)
    nothing = [0] * len(slots)
    columns = zip(
        slots,
        unpack_list(ack.computed),
        unpack_list(ack.emitted),
        unpack_list(ack.drafted) or nothing,
        unpack_list(ack.cached) or nothing,
        strict=True,
    )
    chunks = [
        Chunk(slot, computed - cached, emitted > 0)
        for slot, computed, emitted, drafted, cached in columns
        if computed > 1 and not drafted
    ]
    accounting.ran(slots, chunks, Spent(ack.ended_unix_s, ack.exec_s, ack.decodes_s, ack.drafts_s))
    accounting.note(Happened.FIRST_TOKEN, firsts, ack.ended_unix_s)
    for slot in unpack_list(ack.late):
        accounting.late(slot, 0, 0.0)


async def read(bus: Bus, replica: ReplicaId) -> Stories:
    """Fold the whole log of a replica. Raises BusTimeout."""
    return await fold_in_turns(decode_log(await bus.acks.read(ack_log(replica))), replica)
