"""The spans of a request that has ended: `request`, with its steps as events, and one per phase.
The process that writes the verdict makes them from the record, so no process's end loses any.
"""

from shared.core.record.explanation import answer, others
from shared.core.record.phases import phases
from shared.request_timeline import CAUSES, Happened, Happening
from shared.schemas import Record
from shared.telemetry import conventions as names
from shared.telemetry.telemetry import AttributeValue, SpanEvent, Tracing

EVENTS = {Happened.FIRST_TOKEN: "first_token", Happened.LEFT: "moved"}  # others: their own names


def record_request(tracing: Tracing, record: Record) -> None:
    if not record.traceparent:
        return
    assert record.verdict is not None
    arrived, ended = record.arrived_unix_s, record.verdict.ended_unix_s
    timeline = record.resume.diary
    for phase in phases(timeline, arrived, ended):
        attributes: dict[str, AttributeValue] = {names.ATTEMPT: phase.attempt}
        if phase.replica:
            attributes[names.REPLICA] = phase.replica
        if phase.why:
            attributes[names.REASON] = phase.why
        tracing.record(
            phase.name, record.traceparent, phase.start_unix_s, phase.end_unix_s, attributes
        )
    tracing.record(
        "request",
        record.caller,
        arrived,
        ended,
        _attributes(record),
        own=record.traceparent,
        events=[_event(step) for step in timeline.happenings],
    )


def _attributes(record: Record) -> dict[str, AttributeValue]:
    verdict, slo = record.verdict, record.judged_slo
    assert verdict is not None
    attributes: dict[str, AttributeValue] = {
        names.PROVIDER: names.PROVIDER_NAME,
        names.INPUT_TOKENS: verdict.prompt_tokens,
        names.OUTPUT_TOKENS: verdict.output_tokens,
        names.FINISH_REASONS: [verdict.finish_reason.value],
        names.REQUEST_KEY: record.key,
        names.REQUEST_TIER: record.tier,
        names.SERVICE_CLASS: verdict.service_class.value,
        names.SLO_MET: verdict.slo_met,
        names.RELEGATED: verdict.relegated,
        names.ATTEMPT: verdict.attempts,
        names.REPLICA: verdict.replica or "",
        names.ANSWER: answer(record),
    }
    measured = {
        "slo.ttft_s": slo.ttft_s,
        "slo.tbt_s": slo.tbt_s,
        "slo.ttlt_s": slo.ttlt_s,
        "ttft_s": verdict.ttft_s,
        "worst_tbt_s": verdict.worst_tbt_s,
        "ttlt_s": verdict.ttlt_s,
    }
    missed = verdict.first_missed
    if missed is not None:
        measured |= {
            "missed.due_s": missed.due_s,
            "missed.came_s": missed.came_s,
            "missed.cause_s": missed.cause_s,
        }
        attributes |= {
            names.MISSED_TOKEN: missed.token,
            names.MISSED_BOUND: missed.bound.value,
            names.MISSED_CAUSE: missed.cause.value,
        }
    account = record.resume.diary.account
    measured |= {f"time.{c.value}_s": account.seconds(c) or None for c in CAUSES}
    return attributes | {
        f"slackline.{name}": value for name, value in measured.items() if value is not None
    }


def _event(step: Happening) -> SpanEvent:
    attributes: dict[str, AttributeValue] = {}
    if step.replica:
        attributes[names.REPLICA] = step.replica
    if step.why:
        attributes[names.REASON] = step.why
    if step.neighbours:
        attributes[names.BEHIND] = others(step.neighbours)
    return SpanEvent(EVENTS.get(step.what, step.what.value), step.at_unix_s, attributes)
