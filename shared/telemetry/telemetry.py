"""Tracing: one OpenTelemetry trace per request. The classes here record nothing (spans.py does).
The process that gets a request starts its trace; `traceparent` (W3C) is in headers and record.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

TRACEPARENT = "traceparent"  # the header's name
FORMAT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceParent(NamedTuple):
    """The W3C header: 16 bytes of the trace, 8 of the parent span, and a flag for sampled ones."""

    trace_id: int
    span_id: int
    sampled: bool

    @staticmethod
    def parse(header: str | None) -> "TraceParent | None":
        """The header; None if absent or malformed, to begin a new trace, as the standard asks."""
        found = FORMAT.fullmatch(header) if header else None
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
            return None
        trace_id, span_id = int(found[2], 16), int(found[3], 16)
        if not trace_id or not span_id:
            return None
        return TraceParent(trace_id, span_id, bool(int(found[4], 16) & 1))

    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def trace_id(traceparent: str) -> str:
    """The id of the trace that a header belongs to, as backends write it; empty: none."""
    parent = TraceParent.parse(traceparent)
    return "" if parent is None else f"{parent.trace_id:032x}"


class SpanEvent(NamedTuple):
    name: str
    at_unix_s: float
    attributes: Attributes


class Span:
    """A span that is not recorded. Dotted names are passed as `**{conventions.REPLICA: "r1"}`."""

    def __init__(self, traceparent: str = "") -> None:
        # the header for every message that this span causes; empty if there is no trace
        self.traceparent = traceparent

    def event(self, name: str, **attributes: AttributeValue) -> None:
        pass

    def set(self, **attributes: AttributeValue) -> None:
        """Add attributes; `error.type` marks the span as failed."""

    def end(self, at_unix_s: float | None = None) -> None:
        pass


class Tracing:
    """The tracing of one process. This class records nothing; Recording (spans.py) does."""

    def start(
        self,
        name: str,
        traceparent: str | None,
        attributes: Attributes | None = None,
        *,
        at_unix_s: float | None = None,
        kind: str = "internal",
    ) -> Span:
        """Begin a span under `traceparent`, or a new trace. `kind`: as OpenTelemetry's."""
        return Span(traceparent or "")

    def reserve(self, traceparent: str | None) -> str:
        """The header of a span that is recorded later (`own` of `record`), for spans below it. It
        is under `traceparent`, or the root of a new trace. Empty without tracing.
        """
        return traceparent or ""

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
        """Add a span measured elsewhere. Without a traceparent the span is left out, as it would be
        a trace of its own, unless it was reserved. `links`: headers of spans in other traces.
        """

    def close(self) -> None:
        """Send the spans that are left; blocks for a few seconds at most."""
