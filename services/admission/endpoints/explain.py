"""Explains where the time of a request went, from its record and the log of its replica, or from
the history; and lists the ended requests of a trace or a minute.
"""

import asyncio
import math

import structlog

from services.admission.endpoints.replay import Replays
from shared import subjects
from shared.bus.api import Call, KeyValue
from shared.clock import Clock
from shared.core.record.explanation import explanation
from shared.errors import BusError, PeerError, StoreDamaged
from shared.schemas import EndedRow, Explain, Explanation, FindEnded, FoundEnded, Record, Refused
from shared.store import history
from shared.store.records import Records
from shared.telemetry.telemetry import trace_id

log = structlog.get_logger()

UNKNOWN = "no such request of this tenant, or it ended too long ago (a day, where there is room)"
ROWS = 500  # in one answer, of some 0.3 KB each


class Explanations:
    """Answers of one admission instance to Explain and FindEnded."""

    def __init__(self, records: Records, replays: Replays, past: KeyValue, clock: Clock) -> None:
        """`past`: the bucket of the history."""
        self._records, self._replays, self._past, self._clock = records, replays, past, clock
        # a minute of a busy tenant may be 100 MB: one at a time
        self._finding = asyncio.Lock()

    async def answer(self, question: Explain | FindEnded, call: Call) -> None:
        """Reply with an Explanation, FoundEnded or Refused. Only the operator's explanation names
        other tenants.
        """
        whole = call.subject in (subjects.EXPLAIN_ALL, subjects.HISTORY_ALL)
        answer: Explanation | FoundEnded | Refused
        try:
            tenant = (
                subjects.check_id(question.tenant or subjects.DEFAULT_TENANT, "tenant")
                if whole
                else subjects.tenant_of(call.subject, question.tenant)
            )
            if isinstance(question, Explain):
                answer = await self._explained(tenant, question.request_id, whole=whole)
            else:
                everybody = whole and not question.tenant
                answer = await self._found(question, subjects.EVERY if everybody else tenant)
        except PeerError as error:
            if isinstance(error, StoreDamaged):
                log.error("store.damaged", error=error.message)
            answer = Refused(code=error.code, message=error.message, param=error.param)
        except BusError:
            message = "the store did not answer"
            answer = Refused(code="server_is_overloaded", message=message, retry_after_s=1.0)
        await call.reply(answer)

    async def _explained(
        self, tenant: str, request_id: str, *, whole: bool
    ) -> Explanation | Refused:
        key = subjects.request_key(tenant, request_id)
        stored = await self._records.get(key)
        record = await history.newest(self._past, key) if stored is None else stored.record
        if record is None:
            return Refused(code="not_found", message=UNKNOWN, param="request_id")
        # an ended record has its timeline, and its output apart
        ended = record.verdict is not None
        resume = record.resume if ended else await self._replays.so_far(record)
        now, trace = self._clock.unix_s(), trace_id(record.traceparent)
        return explanation(record, resume, now, trace_id=trace, whole=whole)

    async def _found(self, question: FindEnded, tenant: str) -> FoundEnded:
        """The ended requests of a tenant, or of all (EVERY). Raises PeerError, BusError."""
        if question.trace_id:
            trace = subjects.check_id(question.trace_id, "trace_id")
            async with self._finding:
                records = await history.of_trace(self._past, tenant, trace)
        elif question.minute_unix_s is not None:
            async with self._finding:
                records = await history.of_minute(self._past, tenant, question.minute_unix_s)
        else:
            raise PeerError("name a trace or a minute", param="trace_id")
        rows = sorted(map(_row, records), key=lambda row: (-_late_s(row), row.arrived_unix_s))
        return FoundEnded(rows=rows[:ROWS], left_out=max(len(rows) - ROWS, 0))


def _row(record: Record) -> EndedRow:
    verdict = record.verdict
    assert verdict is not None
    tenant, _, request_id = record.key.partition(".")
    return EndedRow(
        tenant=tenant,
        request_id=request_id,
        tier=record.tier,
        arrived_unix_s=record.arrived_unix_s,
        finish_reason=verdict.finish_reason,
        slo_met=verdict.slo_met,
        first_missed=verdict.first_missed,
    )


def _late_s(row: EndedRow) -> float:
    """The lateness of its first late token: infinite if that never came, negative if none is."""
    if row.first_missed is None:
        return -1.0 if row.slo_met else 0.0
    came_s = row.first_missed.came_s
    return math.inf if came_s is None else came_s - row.first_missed.due_s
