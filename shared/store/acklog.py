"""Reading the ack log: what each attempt on a replica produced. The log is the record; recovery, attach and ends read it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shared.bus.api import Bus
from shared.columns import pack, unpack_list
from shared.schemas import AttemptOver, Fenced, LogEntry, PlanAck, Record, Registered, Resume, Snapshot
from shared.subjects import ack_log
from shared.vocabulary import FinishReason, Measure, ReplicaId, RequestKey

encode_entry = msgspec.msgpack.Encoder().encode
decode_entry = msgspec.msgpack.Decoder(LogEntry).decode

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)  # ends by the output itself: they carry text even without a token


@dataclass(slots=True)
class Story:
    """One attempt on one incarnation, as the log tells it. `offset`: tokens that earlier attempts had made."""

    incarnation: str
    offset: int
    text_offset: int
    tokens: list[int] = field(default_factory=list)  # from `offset` on
    text: str = ""
    measure: Measure | None = None  # where a snapshot gave it; emissions are those since
    emissions: list[tuple[int, float]] = field(default_factory=list)  # (tokens, at_unix_s)
    ended: str = ""
    over: AttemptOver | None = None
    relegated: bool = False

    def resume(self, record: Record) -> Resume:
        """What the next attempt goes on from: the record's own resume with this attempt's tokens after it."""
        before = record.resume
        measure = self.measure
        if measure is None:
            measure = before.measure if before.tokens else Measure.begin(record.slo, record.arrived_unix_s)
        for n, at_unix_s in self.emissions:
            measure = measure.emit(n, at_unix_s, record.slo)
        tokens = unpack_list(before.tokens)[: self.offset] + self.tokens
        return Resume(tokens=pack(tokens), text=before.text[: self.text_offset] + self.text, measure=measure)


def fold(entries: Sequence[LogEntry]) -> dict[tuple[RequestKey, int, str], Story]:
    """(key, attempt, incarnation) -> story, of everything the entries mention."""
    stories: dict[tuple[RequestKey, int, str], Story] = {}
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
                    story = Story(entry.incarnation, held.offset, held.text_offset, unpack_list(kept.tokens), kept.text, kept.measure)
                    stories[held.key, held.attempt, entry.incarnation] = at_slot[held.slot] = story
                for over in entry.overs:
                    stories[over.key, over.attempt, entry.incarnation] = Story(
                        entry.incarnation, 0, 0, unpack_list(over.resume.tokens), over.resume.text, over.resume.measure, [], over.why, over
                    )
            case PlanAck():
                _feed(entry, stories, at_slot)
    return stories


def _feed(ack: PlanAck, stories: dict[tuple[RequestKey, int, str], Story], at_slot: dict[int, Story]) -> None:
    for held in ack.held:
        story = Story(ack.incarnation, held.offset, held.text_offset)
        stories[held.key, held.attempt, ack.incarnation] = at_slot[held.slot] = story
    for slot in unpack_list(ack.relegated):
        if slot in at_slot:
            at_slot[slot].relegated = True
    ended = dict(ack.ended)
    tokens, texts, at = unpack_list(ack.tokens), iter(ack.texts), 0
    for slot, n in zip(unpack_list(ack.slots), unpack_list(ack.emitted), strict=True):
        if not n and ended.get(slot) not in _OWN_ENDS:
            continue
        text = next(texts, "")
        story = at_slot[slot]
        story.tokens += tokens[at : at + n]
        story.text += text
        story.emissions.append((n, ack.ended_unix_s))
        at += n
    for slot, why in ack.ended:
        if slot in at_slot:
            at_slot.pop(slot).ended = why


async def read(bus: Bus, replica: ReplicaId) -> dict[tuple[RequestKey, int, str], Story]:
    """Fold the whole log of a replica. Raises BusTimeout."""
    return fold([decode_entry(payload) for _, payload in await bus.acks.read(ack_log(replica))])
