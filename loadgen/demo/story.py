"""The trace of one request as a timeline: the work of each service on it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.markup import escape
from rich.table import Table

from loadgen.load.report import seconds
from shared.telemetry import conventions as names

# The attributes at the end of a line, under short names.
SHOWN = {
    names.REQUEST_TIER: "tier",
    names.REPLICA: "replica",
    names.ATTEMPT: "attempt",
    names.SERVICE_CLASS: "class",
    names.INPUT_TOKENS: "prompt",
    names.CHUNK: "chunk",
    names.BATCH: "batch",
    names.OUTPUT_TOKENS: "tokens",
    names.REASON: "why",
}
BAR_CELLS = 24


class SpanLine(Struct, frozen=True, kw_only=True):
    """A span: one line of the file that SLACKLINE_TRACE_FILE names."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    service: str
    start_unix_s: float
    end_unix_s: float
    attributes: dict[str, str | bool | int | float | list[str]]


def read_traces(path: Path) -> dict[str, list[SpanLine]]:
    """The spans of each request's trace in the order of their start; none if there is no file.
    Traces of plans are left out.
    """
    traces: defaultdict[str, list[SpanLine]] = defaultdict(list)
    if path.exists():
        for line in path.read_bytes().splitlines():
            span = msgspec.json.decode(line, type=SpanLine)
            traces[span.trace_id].append(span)
    return {
        trace_id: sorted(spans, key=lambda s: (s.start_unix_s, -s.end_unix_s))
        for trace_id, spans in traces.items()
        if any(span.name == "request" for span in spans)
    }


def richest(traces: Mapping[str, Sequence[SpanLine]]) -> str | None:
    """The trace with the most services; among equals the most spans, then the earliest."""
    if not traces:
        return None
    return min(
        traces,
        key=lambda t: (
            -len({s.service for s in traces[t]}),
            -len(traces[t]),
            traces[t][0].start_unix_s,
            t,
        ),
    )


def timeline(trace_id: str, spans: Sequence[SpanLine]) -> Table:
    """A row for each span, indented below its parent, with a bar for its time in the trace."""
    begin_s = min(span.start_unix_s for span in spans)
    whole_s = max(max(span.end_unix_s for span in spans) - begin_s, 1e-9)
    key = next(
        (
            span.attributes[names.REQUEST_KEY]
            for span in spans
            if names.REQUEST_KEY in span.attributes
        ),
        "a request",
    )
    out = Table(
        title=f"{escape(str(key))}, trace {trace_id}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for name in ("after", "took"):
        out.add_column(name, justify="right", no_wrap=True, min_width=6)
    out.add_column("service", no_wrap=True, min_width=9)
    out.add_column("span", no_wrap=True, min_width=19)
    out.add_column("", no_wrap=True, min_width=BAR_CELLS)
    out.add_column("")
    for depth, span in _tree(spans):
        start = min(int(BAR_CELLS * (span.start_unix_s - begin_s) / whole_s), BAR_CELLS - 1)
        length = max(1, round(BAR_CELLS * (span.end_unix_s - span.start_unix_s) / whole_s))
        bar = (" " * start + "━" * length)[:BAR_CELLS].ljust(BAR_CELLS)
        facts = ", ".join(
            f"{short} {span.attributes[long]}"
            for long, short in SHOWN.items()
            if span.attributes.get(long, "") != ""
        )
        out.add_row(
            seconds(span.start_unix_s - begin_s),
            seconds(span.end_unix_s - span.start_unix_s),
            span.service,
            "  " * depth + escape(span.name),
            f"[cyan]{bar}[/]",
            f"[dim]{escape(facts)}[/]",
        )
    return out


def _tree(spans: Sequence[SpanLine]) -> list[tuple[int, SpanLine]]:
    """(depth, span), depth first. A span whose parent is not in the file is a root."""
    known = {span.span_id for span in spans}
    below: defaultdict[str | None, list[SpanLine]] = defaultdict(list)
    for span in spans:
        below[span.parent_span_id if span.parent_span_id in known else None].append(span)
    out: list[tuple[int, SpanLine]] = []

    def walk(parent: str | None, depth: int) -> None:
        for span in below[parent]:
            out.append((depth, span))
            walk(span.span_id, depth + 1)

    walk(None, 0)
    return out
