"""The ack log of a replica, read as the story of each attempt. Recovery and attach read it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import structlog

from shared.bus.api import Bus
from shared.columns import pack, unpack_list
from shared.errors import PeerError
from shared.measure import Measure
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

encode_entry = msgspec.msgpack.Encoder().encode
_entry: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry)


def decode_entry(payload: bytes) -> LogEntry:
    """One entry. Raises PeerError if no worker or admission can have written it."""
    try:
        return _entry.decode(payload)
    except msgspec.MsgspecError as error:
        raise PeerError(
            f"an entry of an ack log cannot be read: {error}", code="unreadable"
        ) from error


def decode_log(rows: Sequence[tuple[int, bytes]]) -> list[LogEntry]:
    """The entries that can be read, in order."""
    entries = []
    for seq, payload in rows:
        try:
            entries.append(decode_entry(payload))
        except PeerError as error:
            log.warning("entry.unreadable", seq=seq, error=error.message)
    return entries


# the reasons that come from the output itself: such an end carries text even without a token
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Story:
    """One attempt on one incarnation, as the log has it. `offset` counts the tokens of earlier
    attempts.
    """

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
    relegated: bool = False  # best-effort at some time
    best_effort: bool = False  # at the end of the story
    logprobs: list[TokenLogprob] = field(default_factory=list)  # parallel to `tokens`, or empty

    def resume(self, record: Record) -> Resume:
        """The resume of the next attempt: the record's own resume, with the tokens of this attempt
        after it.
        """
        before = record.resume
        measure = self.measure
        if measure is None:
            measure = (
                before.measure
                if before.tokens
                else Measure.begin(record.slo, record.arrived_unix_s)
            )
        for n, at_unix_s, thinking_tokens in self.emissions:
            measure = measure.emit(n, at_unix_s, record.slo, thinking_tokens)
        tokens = unpack_list(before.tokens)[: self.offset] + self.tokens
        text = before.text[: self.text_offset] + self.text
        logprobs = before.logprobs[: self.offset] + self.logprobs
        if len(logprobs) != len(tokens):  # one of its engines had none to give
            logprobs = []
        return Resume(tokens=pack(tokens), text=text, measure=measure, logprobs=logprobs)


Stories = dict[tuple[RequestKey, int, str], Story]  # by key, attempt and incarnation


def fold(entries: Sequence[LogEntry]) -> Stories:
    """The story of every attempt that the entries name, by (key, attempt, incarnation)."""
    stories: Stories = {}
    at_slot: dict[int, Story] = {}
    for entry in entries:
        match entry:
            case Registered():
                at_slot.clear()
            case Fenced():
                pass
            case Snapshot():
                for kept in entry.entries:
                    held = kept.held
                    story = Story(
                        entry.incarnation,
                        held.offset,
                        held.text_offset,
                        unpack_list(kept.tokens),
                        kept.text,
                        kept.measure,
                    )
                    story.relegated, story.best_effort = (
                        kept.relegated,
                        kept.service_class is ServiceClass.BEST_EFFORT,
                    )
                    story.logprobs = list(kept.logprobs)
                    stories[held.key, held.attempt, entry.incarnation] = at_slot[held.slot] = story
                for over in entry.overs:
                    made, at = over.resume, (over.key, over.attempt, entry.incarnation)
                    stories[at] = Story(
                        entry.incarnation,
                        0,
                        0,
                        unpack_list(made.tokens),
                        made.text,
                        made.measure,
                        [],
                        over.why,
                        over,
                    )
                    stories[at].relegated = over.relegated
                    stories[at].logprobs = list(made.logprobs)
                    stories[at].best_effort = over.service_class is ServiceClass.BEST_EFFORT
            case PlanAck():
                try:
                    _feed(entry, stories, at_slot)
                except ValueError as error:  # columns that do not fit: no worker of ours wrote that
                    log.warning("entry.unreadable", ack_seq=entry.ack_seq, error=str(error))
    return stories


def _feed(ack: PlanAck, stories: Stories, at_slot: dict[int, Story]) -> None:
    for held in ack.held:
        story = Story(ack.incarnation, held.offset, held.text_offset)
        stories[held.key, held.attempt, ack.incarnation] = at_slot[held.slot] = story
    for slot in unpack_list(ack.relegated):
        if slot in at_slot:
            at_slot[slot].relegated = at_slot[slot].best_effort = True
    for slot in unpack_list(ack.promoted):
        if slot in at_slot:
            at_slot[slot].best_effort = False
    ended, thought = (
        dict(ack.ended),
        dict(zip(unpack_list(ack.answering), unpack_list(ack.thinking_tokens), strict=True)),
    )
    tokens, texts, at = unpack_list(ack.tokens), iter(ack.texts), 0
    logprobs, with_logprobs = iter(ack.logprobs), frozenset(unpack_list(ack.logprob_slots))
    for slot, n in zip(unpack_list(ack.slots), unpack_list(ack.emitted), strict=True):
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
        at += n
    for slot, why in ack.ended:
        if slot in at_slot:
            at_slot.pop(slot).ended = why


async def read(bus: Bus, replica: ReplicaId) -> Stories:
    """Fold the whole log of a replica. Raises BusTimeout."""
    return fold(decode_log(await bus.acks.read(ack_log(replica))))
