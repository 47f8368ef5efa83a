"""python -m services.relegation"""

import asyncio
from random import Random

from services.relegation.config import RelegationConfig
from services.relegation.service import serve
from shared.bus.api import Bus
from shared.clock import Clock
from shared.service import run
from shared.telemetry import Tracing


async def body(cfg: RelegationConfig, bus: Bus, clock: Clock, stop: asyncio.Event, tracing: Tracing, rng: Random) -> None:
    await serve(cfg, bus, clock, stop, tracing=tracing, rng=rng)


if __name__ == "__main__":
    run("relegation", RelegationConfig, body)
