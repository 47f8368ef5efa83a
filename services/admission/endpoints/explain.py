"""Explains where the time of a request went, from its record and the log of its replica."""

import structlog

from services.admission.endpoints.replay import Replays
from shared import subjects
from shared.bus.api import Call
from shared.clock import Clock
from shared.core.record.explanation import explanation
from shared.errors import BusError, PeerError, StoreDamaged
from shared.schemas import Explain, Explanation, Refused
from shared.store.outputs import ENDED_TTL_S
from shared.store.records import Records
from shared.telemetry.telemetry import trace_id

log = structlog.get_logger()

UNKNOWN = (
    f"no such request of this tenant, or it ended more than {ENDED_TTL_S / 60:.0f} minutes ago"
)


class Explanations:
    """Answers of one admission instance to Explain."""

    def __init__(self, records: Records, replays: Replays, clock: Clock) -> None:
        self._records, self._replays, self._clock = records, replays, clock

    async def answer(self, explain: Explain, call: Call) -> None:
        """Reply with an Explanation or Refused. Only the operator's names other tenants."""
        whole = call.subject == subjects.EXPLAIN_ALL
        try:
            tenant = (
                subjects.check_id(explain.tenant or subjects.DEFAULT_TENANT, "tenant")
                if whole
                else subjects.tenant_of(call.subject, explain.tenant)
            )
            answer = await self._explained(tenant, explain.request_id, whole=whole)
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
        if stored is None:
            return Refused(code="not_found", message=UNKNOWN, param="request_id")
        record = stored.record
        # an ended record has its timeline, and its output apart
        ended = record.verdict is not None
        resume = record.resume if ended else await self._replays.so_far(record)
        now, trace = self._clock.unix_s(), trace_id(record.traceparent)
        return explanation(record, resume, now, trace_id=trace, whole=whole)
