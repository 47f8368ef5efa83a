"""Writes the worker's spans (OpenTelemetry). An iteration whose plan is traced is a span of each
request in it, linked to the plan's trace, and a span of that trace. A plan without a traceparent
has none.
"""

from shared.core.worker.step import Ran, Step
from shared.schemas import Record
from shared.telemetry import conventions as names
from shared.telemetry.telemetry import AttributeValue, TraceParent, Tracing

REQUESTS = 8  # of one iteration that get a span


class Traces:
    """The traces of the requests held now, by slot, and of plans to come, by number."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._by_slot: dict[int, str] = {}
        self._plans: dict[int, str] = {}  # by seq

    def held(self, slot: int, record: Record) -> None:
        """Note the request's trace; a slot is used again by a later request."""
        parent = TraceParent.parse(record.traceparent)
        if parent is not None and parent.sampled:
            self._by_slot[slot] = record.traceparent
        else:
            self._by_slot.pop(slot, None)

    def planned(self, seq: int, traceparent: str | None) -> None:
        if traceparent:
            self._plans[seq] = traceparent

    def forget_plans(self) -> None:
        """The plans that were not begun will not be."""
        self._plans.clear()

    def ran(
        self, step: Step, ran: Ran, began_unix_s: float, ended_unix_s: float, idle_s: float
    ) -> None:
        if not self._plans or step.plan is None:
            return
        plan = self._plans.pop(step.plan.seq, "")
        if not plan or not step.work:
            return
        batch: dict[str, AttributeValue] = {
            names.REPLICA: step.plan.replica,
            names.PLAN_SEQ: step.plan.seq,
            names.BATCH: len(step.work),
            names.BATCH_TOKENS: sum(work.tokens for work in step.work),
            names.PREDICTED: step.plan.predicted_s,
            names.MEASURED: ran.exec_s,
            names.IDLE: idle_s,
        }
        self._tracing.record("iteration", plan, began_unix_s, ended_unix_s, batch)
        of_requests = [work for work in step.work if work.slot in self._by_slot]
        of_requests.sort(key=lambda work: -work.tokens)  # prefills first
        for work in of_requests[:REQUESTS]:
            self._tracing.record(
                "iteration",
                self._by_slot[work.slot],
                began_unix_s,
                ended_unix_s,
                batch | {names.CHUNK: work.tokens},
                links=[plan],
            )
