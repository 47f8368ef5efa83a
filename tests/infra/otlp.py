"""A receiver of OpenTelemetry data (OTLP over HTTP) for tests, in place of the collector, which no
package has. It keeps what it is sent, and counts spans as the collector's spanmetrics connector is
configured to.

What this shows: that the services' spans reach a receiver over the real protocol, and that the
queries of the board *Traces* fit the names and labels that the connector documents. What it does
not show: that the collector reads its configuration, or what it makes of spans that come late.
"""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loadgen.fleet.metrics_page import Server, listen
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry

CONFIG = Path(__file__).parents[2] / "infra" / "otel" / "collector.yaml"
UNITS = {"ms": ("milliseconds", 1e-3), "s": ("seconds", 1.0)}
PROTOBUF = "application/x-protobuf"


class Seen(NamedTuple):
    """A span that was received."""

    service: str
    name: str
    trace_id: str
    attributes: dict[str, Any]
    failed: bool


class Receiver:
    """Everything received so far. `metrics`: the newest points by name of metric."""

    def __init__(self, config: Path = CONFIG) -> None:
        self.address = ""  # host:port
        self.spans: deque[Seen] = deque(maxlen=100_000)
        self.metrics: dict[str, list[HistogramDataPoint]] = {}
        connector = yaml.safe_load(config.read_text())["connectors"]["spanmetrics"]
        prefix = connector["namespace"].replace(".", "_")
        unit, _ = UNITS[connector["histogram"]["unit"]]
        self._dimensions = [one["name"] for one in connector["dimensions"]]
        labels = ["service_name", "span_name", "span_kind", "status_code"]
        labels += [name.replace(".", "_") for name in self._dimensions]
        bounds = [seconds(text) for text in connector["histogram"]["explicit"]["buckets"]]
        self._registry = Registry()
        self._calls = self._registry.counter(f"{prefix}_calls_total", "Spans.", labels)
        self._durations = self._registry.histogram(
            f"{prefix}_duration_{unit}", "Their durations.", bounds, labels
        )

    def take_traces(self, raw: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._count(service, span)

    def take_metrics(self, raw: bytes) -> None:
        for resource in ExportMetricsServiceRequest.FromString(raw).resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.metrics[metric.name] = list(metric.histogram.data_points)

    def text(self, accept: str) -> tuple[str, str]:
        """The content type and the span metrics, as the collector's exporter shows them."""
        return exposition([self._registry], accept)

    def _count(self, service: str, span: Span) -> None:
        attributes, trace_id = values(span.attributes), span.trace_id.hex()
        failed = span.status.code == Status.STATUS_CODE_ERROR
        self.spans.append(Seen(service, span.name, trace_id, attributes, failed))
        own = [str(attributes.get(name, "")).lower() for name in self._dimensions]
        kind, status = Span.SpanKind.Name(span.kind), Status.StatusCode.Name(span.status.code)
        labels = (service, span.name, kind, status, *own)
        lasted_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        self._calls.labels(*labels).add()
        self._durations.labels(*labels).observe(lasted_s, 1, trace_id)


def seconds(text: str) -> float:
    """A duration of Go, in one unit."""
    unit = "ms" if text.endswith("ms") else "s"
    return float(text.removesuffix(unit)) * UNITS[unit][1]


def values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        found[one.key] = getattr(one.value, kind) if kind else None
    return found


def app(one: Receiver) -> Starlette:
    """POST /v1/traces, POST /v1/metrics; GET /metrics."""

    async def traces(request: Request) -> Response:
        one.take_traces(await request.body())
        return Response(ExportTraceServiceResponse().SerializeToString(), media_type=PROTOBUF)

    async def metrics(request: Request) -> Response:
        one.take_metrics(await request.body())
        return Response(ExportMetricsServiceResponse().SerializeToString(), media_type=PROTOBUF)

    async def page(request: Request) -> Response:
        kind, text = one.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    return Starlette(
        routes=[
            Route("/v1/traces", traces, methods=["POST"]),
            Route("/v1/metrics", metrics, methods=["POST"]),
            Route("/metrics", page),
        ]
    )


def server_of(one: Receiver) -> Server:
    return Server(uvicorn.Config(app(one), log_config=None, access_log=False, lifespan="off"))


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    """Receive while the context is open."""
    one, listener = Receiver(), listen("127.0.0.1", 0)
    one.address = "{}:{}".format(*listener.getsockname()[:2])
    server = server_of(one)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="otlp")
    try:
        yield one
    finally:
        server.should_exit = True
        await serving


def main() -> None:
    """The receiver as a container, called as the collector is: --config FILE."""
    _, _, config = sys.argv
    sockets = [listen("0.0.0.0", port) for port in (4318, 8889)]
    asyncio.run(server_of(Receiver(Path(config))).serve(sockets=sockets))


if __name__ == "__main__":
    main()
