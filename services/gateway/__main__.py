"""python -m services.gateway"""

import asyncio
import signal
import socket
import sys

import uvloop

from services.gateway.config import GatewayConfig
from services.gateway.service import listen, serve
from shared.errors import ConfigError
from shared.process import logs, tracing
from shared.process.configuration import load


async def main() -> None:
    """Runs the gateway. Raises ConfigError for anything that the operator must change."""
    instance = f"gateway-{socket.gethostname()}"
    logs.configure("gateway", instance)
    cfg = load(GatewayConfig, "gateway")
    traces = tracing.configure("gateway", instance)
    stop = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, stop.set)
    try:
        await serve(cfg, listen(cfg), stop, traces)
    finally:
        traces.close()


if __name__ == "__main__":
    try:
        uvloop.run(main())
    except ConfigError as error:
        sys.exit(f"gateway: {error}")
