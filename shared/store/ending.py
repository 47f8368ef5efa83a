"""The end of a request. Its verdict is written by compare-and-set, so the first one wins; then
client, metrics and log receive it, once.
"""

from collections.abc import Callable

import structlog

from shared.bus.api import Bus
from shared.core.verdict import GOOD_ENDS
from shared.errors import BusError
from shared.process import conventions as names
from shared.process.instruments import Registry
from shared.process.logs import traced
from shared.process.request_spans import record_request
from shared.process.telemetry import Tracing
from shared.schemas import End, Record
from shared.store.records import Records, Stored
from shared.vocabulary import RequestKey

log = structlog.get_logger()


class Ending:
    """Sets verdicts on behalf of one service."""

    def __init__(self, bus: Bus, records: Records, tracing: Tracing, metrics: Registry) -> None:
        self._bus, self._records, self._tracing = bus, records, tracing
        self._requests = metrics.counter(
            names.REQUESTS, "Requests ended, by verdict.", ("tier", "verdict")
        )
        self._violations = metrics.counter(
            names.SLO_VIOLATIONS, "Finished requests that missed their SLO.", ("tier", "type")
        )
        self._relegations = metrics.counter(
            names.RELEGATIONS, "Requests that were best-effort at some time.", ("tier",)
        )
        self._ttft = metrics.histogram(
            names.TIME_TO_FIRST_TOKEN, "Arrival to first token.", names.TTFT_BUCKETS_S, ("tier",)
        )

    async def end(self, key: RequestKey, step: Callable[[Record], Record | None]) -> Stored | None:
        """Apply `step`, an event of shared/core/record.py that may end the request. Returns what
        was written, None if nothing was.
        """
        stored = await self._records.change(key, step)
        if stored is not None and stored.record.verdict is not None:
            await self._announce(stored.record)
        return stored

    async def restore(self, ended: Record) -> None:
        """Store and announce the end of a request whose record was deleted, unless its key is
        taken.
        """
        if await self._records.restore(ended) is not None:
            await self._announce(ended)

    async def _announce(self, record: Record) -> None:
        """Publish, count and log a verdict that this process wrote."""
        with traced(record.traceparent):
            await self._announced(record)

    async def _announced(self, record: Record) -> None:
        verdict = record.verdict
        assert verdict is not None
        try:
            await self._bus.publish(record.stream_subject, End(verdict=verdict), json=record.json)
        except BusError as error:  # a client that receives nothing attaches
            log.warning("end.lost", request=record.key, error=str(error))
        finished = verdict.finish_reason in GOOD_ENDS
        self._requests.labels(
            record.tier,
            "met" if verdict.slo_met else "missed" if finished else verdict.finish_reason.value,
        ).add()
        if finished and not verdict.slo_met:
            self._violations.labels(record.tier, verdict.missed.value).add()
        if verdict.relegated:
            self._relegations.labels(record.tier).add()
        if verdict.ttft_s is not None:
            self._ttft.labels(record.tier).observe(verdict.ttft_s)
        record_request(self._tracing, record)
        log.info(
            "request.finished",
            request=record.key,
            tier=record.tier,
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
        await self._records.forget_body(record.body_key)
