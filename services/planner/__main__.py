"""python -m services.planner"""

import asyncio
from random import Random

from services.planner.config import PlannerConfig
from services.planner.service import Planner
from shared.bus.api import Bus
from shared.clock import Clock
from shared.policy import registry
from shared.process.main import Export, run
from shared.process.telemetry import Tracing


async def body(
    cfg: PlannerConfig,
    bus: Bus,
    clock: Clock,
    stop: asyncio.Event,
    tracing: Tracing,
    rng: Random,
    export: Export,
) -> None:
    # a policy that does not exist stops the start, not the first seat
    registry.make(cfg.policy, cfg.settings)
    planner = Planner(cfg, bus, clock, tracing, rng)
    export(planner.metrics)
    await planner.run(stop)


if __name__ == "__main__":
    run("planner", PlannerConfig, body)
