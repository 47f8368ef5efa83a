"""Chooses the tracing of a process. No tracing costs nothing: the SDK is not even imported.

Tracing is on if OTEL_TRACES_EXPORTER is `otlp` or `console`, OTEL_EXPORTER_OTLP_ENDPOINT is set, or
SLACKLINE_TRACE_FILE names a file for spans as JSON lines, to which many may append.
OTEL_TRACES_EXPORTER=none and OTEL_SDK_DISABLED=true turn exporters off. Sampling is parent-based,
with the ratio OTEL_TRACES_SAMPLER_ARG (1) for roots.
"""

import os
from collections.abc import Callable, Mapping

from shared.clock import Clock
from shared.errors import ConfigError
from shared.telemetry.telemetry import Tracing

EXPORTERS = ("otlp", "console", "none")


def configure(
    service: str,
    instance: str = "",
    environ: Mapping[str, str] | None = None,
    now_unix_s: Callable[[], float] | None = None,
) -> Tracing:
    """The tracing that the environment wants. Raises ConfigError for a wrong exporter or ratio."""
    env = os.environ if environ is None else environ
    exporters = [e.strip() for e in env.get("OTEL_TRACES_EXPORTER", "").split(",") if e.strip()]
    for exporter in exporters:
        if exporter not in EXPORTERS:
            raise ConfigError(
                f"OTEL_TRACES_EXPORTER={exporter!r}: use one of {', '.join(EXPORTERS)}"
            )
    if not exporters and (
        env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    ):
        exporters = ["otlp"]
    exporters = [e for e in exporters if e != "none"]
    trace_file = env.get("SLACKLINE_TRACE_FILE")
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (exporters or trace_file):
        return Tracing()
    try:
        ratio = float(env.get("OTEL_TRACES_SAMPLER_ARG") or 1.0)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError(
            f"OTEL_TRACES_SAMPLER_ARG={env['OTEL_TRACES_SAMPLER_ARG']!r}: a ratio from 0 to 1"
        )
    # imported here: with tracing off the SDK is never loaded
    from shared.telemetry.spans import Recording

    return Recording(service, instance, exporters, trace_file, ratio, now_unix_s or Clock().unix_s)
