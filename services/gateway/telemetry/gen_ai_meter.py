"""Exports OpenTelemetry's metrics of generative AI (GenAI), with its names and buckets."""

import os

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from services.gateway.telemetry.gen_ai import GenAi, Operation
from shared.telemetry import conventions as names

EXPORT_S = 3.0  # the longest time for one export; also of the last one, at the stop


class Meter(GenAi):
    """Keeps histograms, which a thread of the SDK exports from time to time."""

    def __init__(self, service: str, instance: str) -> None:
        resource = Resource.create(
            {
                "service.namespace": "slackline",
                "service.name": service,
                "service.instance.id": instance,
            }
        )
        timeout_s = None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else EXPORT_S
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(timeout=timeout_s))
        self._provider = MeterProvider([reader], resource)
        meter = self._provider.get_meter("slackline")
        self._duration, self._ttft, self._tpot = (
            meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)
            for name, text, bounds in (
                (
                    names.GEN_AI_DURATION,
                    "Duration of a request, from its head to its last byte.",
                    names.GEN_AI_DURATION_BUCKETS_S,
                ),
                (names.GEN_AI_TTFT, "Arrival to first token.", names.GEN_AI_TTFT_BUCKETS_S),
                (
                    names.GEN_AI_TPOT,
                    "Mean time per output token after the first.",
                    names.GEN_AI_TPOT_BUCKETS_S,
                ),
            )
        )

    def record(self, operation: Operation) -> None:
        attributes = {
            names.OPERATION: operation.name,
            names.PROVIDER: names.PROVIDER_NAME,
            names.REQUEST_MODEL: operation.model,
            names.RESPONSE_MODEL: operation.model,
        }
        for ttft_s, tpot_s in operation.choices:
            if ttft_s is not None:
                self._ttft.record(ttft_s, attributes)
            if tpot_s is not None:
                self._tpot.record(tpot_s, attributes)
        if operation.error_type:
            attributes[names.ERROR_TYPE] = operation.error_type
        self._duration.record(operation.duration_s, attributes)

    def close(self) -> None:
        self._provider.shutdown(EXPORT_S * 1000)
