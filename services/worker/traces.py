"""The worker's part of a request's trace: the wait for its first iteration, and the iterations that
served it.

A request without a traceparent costs nothing here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.turn import Work
from shared.process import conventions as names
from shared.process.telemetry import AttributeValue, Tracing
from shared.schemas import AttemptOver, Record
from shared.vocabulary import RequestKey


@dataclass(slots=True)
class _Traced:
    key: RequestKey
    traceparent: str
    held_unix_s: float
    began_unix_s: float = 0.0
    first_seq: int = 0
    last_seq: int = 0
    iterations: int = 0


class Traces:
    """The traces of the requests held now, by slot."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._by_slot: dict[int, _Traced] = {}

    def held(self, slot: int, record: Record, at_unix_s: float) -> None:
        if record.traceparent:
            self._by_slot[slot] = _Traced(record.key, record.traceparent, at_unix_s)

    def ran(self, seq: int, work: Sequence[Work], began_unix_s: float) -> None:
        if not self._by_slot:
            return
        for entry in work:
            traced = self._by_slot.get(entry.slot)
            if traced is not None:
                if not traced.iterations:
                    traced.began_unix_s, traced.first_seq = began_unix_s, seq
                traced.iterations += 1
                traced.last_seq = seq

    def over(self, overs: Sequence[AttemptOver], at_unix_s: float) -> None:
        if not self._by_slot:
            return
        for over in overs:
            slot = next((s for s, t in self._by_slot.items() if t.key == over.key), None)
            if slot is None:
                continue
            traced = self._by_slot.pop(slot)
            attributes: dict[str, AttributeValue] = {
                names.REPLICA: over.replica,
                names.ATTEMPT: over.attempt,
            }
            began = traced.began_unix_s or at_unix_s
            self._tracing.record("queue", traced.traceparent, traced.held_unix_s, began, attributes)
            if traced.iterations:
                attributes |= {
                    "slackline.iterations": traced.iterations,
                    "slackline.plan.first_seq": traced.first_seq,
                    "slackline.plan.last_seq": traced.last_seq,
                    names.OUTPUT_TOKENS: len(over.resume.tokens) // 4,
                    names.SERVICE_CLASS: over.service_class.value,
                    "slackline.end": over.why,
                }
                self._tracing.record("iterations", traced.traceparent, began, at_unix_s, attributes)
