"""Ends requests for admission and relegation: the first verdict written wins, and is announced."""

from collections.abc import Callable
from contextlib import suppress

import structlog

from shared import subjects
from shared.bus.api import Bus
from shared.errors import BusError, PeerError
from shared.placing.outcomes import Outcomes
from shared.process.logs import traced
from shared.schemas import End, Ended, Record
from shared.store import history
from shared.store.records import Records, Stored
from shared.store.usage import Usage
from shared.telemetry.request_spans import record_request
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import RequestKey

log = structlog.get_logger()


class Ending:
    """Writes and announces verdicts on behalf of one service."""

    def __init__(
        self,
        bus: Bus,
        records: Records,
        tracing: Tracing,
        outcomes: Outcomes,
        usage: Usage,
        on_end: Callable[[Record], None] | None = None,
    ) -> None:
        """`on_end`: called with each record that this process ended, before its client is told."""
        self._bus, self._records, self._tracing, self._outcomes = bus, records, tracing, outcomes
        self._usage, self._on_end = usage, on_end

    async def end(self, key: RequestKey, step: Callable[[Record], Record | None]) -> Stored | None:
        """Apply `step`, which may end the request. Returns what was written, or None."""
        stored = await self._records.change(key, step)
        if stored is not None and stored.record.verdict is not None:
            await self._announce(stored.record)
        return stored

    async def restore(self, ended: Record) -> None:
        """Store and announce the end of a request whose record was deleted, if its key is free."""
        if await self._records.restore(ended) is not None:
            await self._announce(ended)

    async def _announce(self, record: Record) -> None:
        """Publish, count and log a verdict that this process wrote."""
        if self._on_end is not None:
            self._on_end(record)
        with traced(record.traceparent):
            await self._announced(record)

    async def _announced(self, record: Record) -> None:
        verdict = record.verdict
        assert verdict is not None
        try:
            await self._bus.publish(record.stream_subject, End(verdict=verdict), json=record.json)
        except BusError as error:  # a client that receives no event asks for them (Attach)
            log.warning("end.lost", request=record.key, error=str(error))
        with suppress(BusError):
            await self._bus.publish(subjects.ENDED, _ended(record))
        self._outcomes.ended(record)
        self._usage.add(record.key, verdict)
        record_request(self._tracing, record)
        log.info(
            "request.finished",
            request=record.key,
            tier=record.tier,
            model=record.model or None,
            finish_reason=verdict.finish_reason.value,
            slo_met=verdict.slo_met,
            relegated=verdict.relegated,
            attempts=verdict.attempts,
            replica=verdict.replica,
            prompt_tokens=verdict.prompt_tokens,
            output_tokens=verdict.output_tokens,
            ttft_s=verdict.ttft_s,
            worst_tbt_s=verdict.worst_tbt_s,
            ttlt_s=verdict.ttlt_s,
            missed=verdict.missed.value or None,
            cause=None if verdict.first_missed is None else verdict.first_missed.cause.value,
        )
        with suppress(BusError, PeerError):  # nobody waits for it
            await self._bus.publish(history.subject_of(record), history.kept(record))
        await self._records.forget_body(record.body_key)


def _ended(record: Record) -> Ended:
    return Ended(
        tier=record.tier,
        key=record.key,
        slo=record.slo,
        arrived_unix_s=record.arrived_unix_s,
        verdict=record.verdict,
        model=record.model,
    )
