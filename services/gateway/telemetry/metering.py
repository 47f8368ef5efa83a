"""Chooses whether a gateway exports GenAI metrics over OTLP. Unless OTEL_METRICS_EXPORTER is `otlp`
they cost nothing, and the SDK is not imported. The SDK's main variables are
OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_METRICS_ENDPOINT and OTEL_METRIC_EXPORT_INTERVAL.
"""

import os
from collections.abc import Mapping

from services.gateway.telemetry.gen_ai import GenAi
from shared.errors import ConfigError

EXPORTERS = ("otlp", "none")


def configure(service: str, instance: str, environ: Mapping[str, str] | None = None) -> GenAi:
    """The meter of this process, as its environment asks for it.

    Raises: ConfigError for an exporter that does not exist.
    """
    env = os.environ if environ is None else environ
    wanted = [e.strip() for e in env.get("OTEL_METRICS_EXPORTER", "").split(",") if e.strip()]
    for exporter in wanted:
        if exporter not in EXPORTERS:
            raise ConfigError(
                f"OTEL_METRICS_EXPORTER={exporter!r}: use one of {', '.join(EXPORTERS)}"
            )
    if "otlp" not in wanted or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return GenAi()
    # imported here: with OTLP metrics off the SDK is never loaded
    from services.gateway.telemetry.gen_ai_meter import Meter

    return Meter(service, instance)
