"""Tests of the gateway's GenAI metrics: they are off unless the environment asks for them."""

import subprocess
import sys

import pytest

from services.gateway.telemetry.gen_ai import GenAi
from services.gateway.telemetry.metering import configure
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({}, False),
        ({"OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, True),
    ],
)
def test_they_are_on_only_where_they_are_asked_for(
    env: dict[str, str], on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    meter = configure("gateway", "g1", env)
    assert (type(meter) is GenAi) is not on
    meter.close()


def test_an_exporter_that_there_is_not_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="OTEL_METRICS_EXPORTER"):
        configure("gateway", "g1", {"OTEL_METRICS_EXPORTER": "prometheus"})


def test_off_loads_no_sdk() -> None:
    code = (
        "import sys; from services.gateway.telemetry.metering import configure;"
        "configure('g', 'g', {});"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
