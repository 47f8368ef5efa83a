"""Tracing through the OpenTelemetry SDK. Only this module imports it, and only if tracing is on."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from shared.telemetry.conventions import ERROR_TYPE
from shared.telemetry.telemetry import (
    Attributes,
    AttributeValue,
    Span,
    SpanEvent,
    TraceParent,
    Tracing,
)

KINDS = {kind.name.lower(): kind for kind in trace.SpanKind}
EXPORT_S = 3.0  # the longest time for one batch, repeats included
FILE_DELAY_MS = 200  # a killed process loses at most the spans of this time


class RecordedSpan(Span):
    def __init__(self, span: trace.Span, now_unix_s: Callable[[], float]) -> None:
        self._span = span
        self._now_unix_s = now_unix_s
        context = span.get_span_context()
        parent = TraceParent(context.trace_id, context.span_id, context.trace_flags.sampled)
        super().__init__(parent.header())

    def event(self, name: str, **attributes: AttributeValue) -> None:
        self._span.add_event(name, attributes, _ns(self._now_unix_s()))

    def set(self, **attributes: AttributeValue) -> None:
        self._span.set_attributes(attributes)
        if ERROR_TYPE in attributes:
            self._span.set_status(trace.StatusCode.ERROR, str(attributes[ERROR_TYPE]))

    def end(self, at_unix_s: float | None = None) -> None:
        self._span.end(_ns(self._now_unix_s() if at_unix_s is None else at_unix_s))


class _Ids(RandomIdGenerator):
    """Random ids, except for a span that was reserved."""

    def __init__(self) -> None:
        self.next: TraceParent | None = None

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.next is None else self.next.span_id

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.next is None else self.next.trace_id


class Recording(Tracing):
    """Tracing into the exporters, in batches on a thread of the SDK."""

    def __init__(
        self,
        service: str,
        instance: str,
        exporters: Sequence[str],
        trace_file: str | None,
        ratio: float,
        now_unix_s: Callable[[], float],
    ) -> None:
        resource = Resource.create(
            {
                "service.namespace": "slackline",
                "service.name": service,
                "service.instance.id": instance,
            }
        )
        self._now_unix_s = now_unix_s
        self._ids = _Ids()
        self._provider = TracerProvider(
            id_generator=self._ids,
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=resource,
            span_limits=SpanLimits(max_events=512),  # a long answer must not fill memory
            shutdown_on_exit=True,
        )
        for exporter in exporters:
            self._provider.add_span_processor(BatchSpanProcessor(_exporter(exporter)))
        if trace_file:
            self._provider.add_span_processor(
                BatchSpanProcessor(JsonLines(Path(trace_file)), schedule_delay_millis=FILE_DELAY_MS)
            )
        self._tracer = self._provider.get_tracer("slackline")

    def start(
        self,
        name: str,
        traceparent: str | None,
        attributes: Attributes | None = None,
        *,
        at_unix_s: float | None = None,
        kind: str = "internal",
    ) -> Span:
        parent = TraceParent.parse(traceparent)
        if parent is not None and not parent.sampled:
            return Span(parent.header())
        at_ns = _ns(self._now_unix_s() if at_unix_s is None else at_unix_s)
        span = self._tracer.start_span(
            name, _context(parent), KINDS[kind], attributes, start_time=at_ns
        )
        if span.is_recording():
            return RecordedSpan(span, self._now_unix_s)
        # a root that was not sampled: its children must know that
        context = span.get_span_context()
        parent = TraceParent(context.trace_id, context.span_id, False)
        return Span(parent.header() if context.is_valid else "")

    def reserve(self, traceparent: str | None) -> str:
        # a span that never ends is never exported: it only gives its ids
        return self.start("reserved", traceparent).traceparent

    def record(
        self,
        name: str,
        traceparent: str,
        start_unix_s: float,
        end_unix_s: float,
        attributes: Attributes | None = None,
        *,
        own: str = "",
        events: Sequence[SpanEvent] = (),
        links: Sequence[str] = (),
    ) -> None:
        parent, ids = TraceParent.parse(traceparent), TraceParent.parse(own)
        says = ids or parent
        if says is None or not says.sampled:
            return
        if ids is not None and parent is not None and parent.trace_id != ids.trace_id:
            parent = None
        self._ids.next = ids
        span = self._tracer.start_span(
            name,
            _context(parent),
            attributes=attributes,
            links=[
                trace.Link(_remote(linked, sampled=True))
                for linked in map(TraceParent.parse, links)
                if linked is not None
            ],
            start_time=_ns(start_unix_s),
        )
        self._ids.next = None
        for event in events:
            span.add_event(event.name, event.attributes, _ns(event.at_unix_s))
        span.end(_ns(end_unix_s))

    def close(self) -> None:
        self._provider.shutdown()


class JsonLines(SpanExporter):
    """Appends finished spans to a file as JSON lines, a batch in one write: many can share it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raw = b"".join(msgspec.json.encode(_plain(span)) + b"\n" for span in spans)
        whole = os.write(self._fd, raw) == len(raw)
        return SpanExportResult.SUCCESS if whole else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        os.close(self._fd)


def _plain(span: ReadableSpan) -> dict[str, Any]:
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    assert span.start_time is not None
    assert span.end_time is not None  # only finished spans are exported
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_span_id": f"{parent.span_id:016x}" if parent else None,
        "name": span.name,
        "service": span.resource.attributes["service.name"],
        "instance": span.resource.attributes["service.instance.id"],
        "start_unix_s": span.start_time / 1e9,
        "end_unix_s": span.end_time / 1e9,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": e.name, "at_unix_s": e.timestamp / 1e9, "attributes": dict(e.attributes or {})}
            for e in span.events
        ],
        "links": [
            {"trace_id": f"{c.trace_id:032x}", "span_id": f"{c.span_id:016x}"}
            for c in (link.context for link in span.links)
        ],
    }


def _exporter(name: str) -> SpanExporter:
    if name == "console":
        return ConsoleSpanExporter()
    # imported here: it is heavy and brings an HTTP client
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # OTEL_EXPORTER_OTLP_* are the exporter's; its timeout of 10 s would hold up every stop
    return OTLPSpanExporter(
        timeout=None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else EXPORT_S
    )


def _context(parent: TraceParent | None) -> Context:
    if parent is None:
        return Context()  # empty: never the ambient one
    context = _remote(parent, sampled=parent.sampled)
    return trace.set_span_in_context(trace.NonRecordingSpan(context), Context())


def _remote(span: TraceParent, *, sampled: bool) -> trace.SpanContext:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if sampled else trace.TraceFlags.DEFAULT)
    return trace.SpanContext(span.trace_id, span.span_id, is_remote=True, trace_flags=flags)


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)
