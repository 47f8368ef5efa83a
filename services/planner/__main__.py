"""python -m services.planner"""

import asyncio
from random import Random

from services.planner.config import PlannerConfig
from services.planner.service import serve
from shared.bus.api import Bus
from shared.clock import Clock
from shared.policy import registry
from shared.service import run
from shared.telemetry import Tracing


async def body(cfg: PlannerConfig, bus: Bus, clock: Clock, stop: asyncio.Event, tracing: Tracing, rng: Random) -> None:
    registry.make(cfg.policy, cfg.settings)  # a policy that does not exist stops the start, not the first seat
    await serve(cfg, bus, clock, stop, tracing=tracing, rng=rng)


if __name__ == "__main__":
    run("planner", PlannerConfig, body)
