"""The metrics of OpenTelemetry's GenAI convention, by OTLP. Off unless OTEL_METRICS_EXPORTER is
`otlp`; the SDK is not imported while they are off.

Prometheus' names (services' own `/metrics`) are there in any case. Of the SDK's variables,
OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_METRICS_ENDPOINT and OTEL_METRIC_EXPORT_INTERVAL
matter most.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from shared.errors import ConfigError

EXPORTERS = ("otlp", "none")


class Operation(NamedTuple):
    """One call of the API. `choices`: TTFT and mean time per further token of each, where known."""

    name: str  # chat, text_completion
    model: str
    duration_s: float
    error_type: str  # empty: it went well
    choices: Sequence[tuple[float | None, float | None]]


class GenAi(Protocol):
    """The meter of one process."""

    def record(self, operation: Operation) -> None: ...

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""


class Off:
    """A meter that does nothing."""

    def record(self, operation: Operation) -> None:
        pass

    def close(self) -> None:
        pass


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
        return Off()
    # imported here: with OTLP metrics off the SDK is never loaded
    from shared.process.gen_ai_meter import Meter

    return Meter(service, instance)
