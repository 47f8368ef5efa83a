"""Runs a gateway: python -m services.gateway"""

import socket

from services.gateway.config import GatewayConfig
from services.gateway.http.certificate import certificate_of
from services.gateway.service import listen, serve
from services.gateway.telemetry import metering
from shared.process import logs
from shared.process.configuration import load
from shared.process.main import run_until_stopped, stop_on_signals, told_settings
from shared.process.reload import rules_of, tiers_in
from shared.telemetry import tracing


async def main() -> None:
    """Runs the gateway. Raises ConfigError for anything that the operator must change."""
    instance = f"gateway-{socket.gethostname()}"
    logs.configure("gateway", instance)
    cfg = load(GatewayConfig, "gateway")
    traces = tracing.configure("gateway", instance)
    meter = metering.configure("gateway", instance)
    try:
        await serve(cfg, listen(cfg), stop_on_signals(), traces, meter)
    finally:
        traces.close()
        meter.close()


if __name__ == "__main__" and not told_settings(
    "gateway", GatewayConfig, tiers_in, rules_of, certificate_of, GatewayConfig.beside_keys
):
    run_until_stopped("gateway", main())
