"""The history: what became of each ended request, kept for a day where the bucket has room.

A record leaves the store minutes after its end. Before, it is published into the stream of the
bucket, without its output and without waiting for an answer: one that is lost is missing there and
nowhere else. Its subject is `TENANT.MINUTE.ID.TRACE.OUTCOME`, so that the server finds it by each:
the minute is that of its arrival, in minutes of Unix time.
"""

import asyncio
from collections.abc import Sequence

import msgspec
import structlog
from msgspec.structs import replace

from shared.bus.api import KeyValue
from shared.core.record.record import without_output
from shared.core.record.verdict import GOOD_ENDS
from shared.errors import StoreDamaged
from shared.schemas import Record
from shared.store.records import LISTED_AT_ONCE
from shared.store.seal import read
from shared.subjects import EVERY, HISTORY_BUCKET
from shared.telemetry.telemetry import trace_id
from shared.vocabulary import RequestKey

MINUTE_S = 60.0
NO_TRACE = "-"

log = structlog.get_logger()

_record = msgspec.msgpack.Decoder(Record)


def subject_of(ended: Record) -> str:
    """The subject under which an ended record is kept."""
    verdict = ended.verdict
    assert verdict is not None
    tenant, _, request_id = ended.key.partition(".")
    finished = verdict.finish_reason in GOOD_ENDS
    outcome = ("met" if verdict.slo_met else "missed") if finished else verdict.finish_reason.value
    trace = trace_id(ended.traceparent) or NO_TRACE
    minute = minute_of(ended.arrived_unix_s)
    return f"$KV.{HISTORY_BUCKET}.{tenant}.{minute}.{request_id}.{trace}.{outcome}"


def kept(ended: Record) -> Record:
    """The record without what explains nothing: its output, and what only its delivery needs."""
    bare = without_output(ended, "")
    return replace(bare, body_key="", stream_subject="", caller="", asked=b"", body=b"")


def minute_of(at_unix_s: float) -> int:
    return int(at_unix_s // MINUTE_S)


async def newest(bucket: KeyValue, key: RequestKey) -> Record | None:
    """The request of this key that ended last; None if none is kept. Raises BusError."""
    tenant, _, request_id = key.partition(".")
    found = await _found(bucket, f"{tenant}.{EVERY}.{request_id}.")
    return found[-1] if found else None


async def of_trace(bucket: KeyValue, tenant: str, trace: str) -> Sequence[Record]:
    """The requests of a trace, of a tenant or of all (EVERY). Raises BusError."""
    return await _found(bucket, f"{tenant}.{EVERY}.{EVERY}.{trace}.")


async def of_minute(bucket: KeyValue, tenant: str, at_unix_s: float) -> Sequence[Record]:
    """The requests of a tenant that came in the minute of this instant. Raises BusError."""
    return await _found(bucket, f"{tenant}.{minute_of(at_unix_s)}.")


async def _found(bucket: KeyValue, prefix: str) -> Sequence[Record]:
    """The records below a prefix, in the order of their ends; a damaged one is logged."""
    found = []
    for n, (name, entry) in enumerate(await bucket.scan(prefix), 1):
        if n % LISTED_AT_ONCE == 0:  # there may be thousands
            await asyncio.sleep(0)
        try:
            record = read(_record, name, entry.value)
        except StoreDamaged as error:
            log.error("history.damaged", key=name, error=error.message)
            continue
        if record.verdict is not None:
            found.append(record)
    return found
