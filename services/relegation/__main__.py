"""python -m services.relegation"""

import asyncio
from random import Random

from services.relegation.config import RelegationConfig
from services.relegation.service import Relegation
from shared.bus.api import Bus
from shared.clock import Clock
from shared.process.main import Export, run
from shared.process.telemetry import Tracing


async def body(
    cfg: RelegationConfig,
    bus: Bus,
    clock: Clock,
    stop: asyncio.Event,
    tracing: Tracing,
    rng: Random,
    export: Export,
) -> None:
    relegation = Relegation(cfg, bus, clock, tracing, rng)
    export(relegation.metrics)
    await relegation.run(stop)


if __name__ == "__main__":
    run("relegation", RelegationConfig, body)
