"""python -m services.worker"""

import asyncio
from random import Random

from services.worker.config import WorkerConfig
from services.worker.engine_process import engine_process
from services.worker.engines.make import make
from services.worker.runner import ThreadRunner
from services.worker.service import serve
from services.worker.turn_taker import TurnTaker
from shared.bus.api import Bus
from shared.clock import Clock
from shared.process.instruments import Registry
from shared.process.main import Export, run
from shared.process.telemetry import Tracing


async def body(
    cfg: WorkerConfig,
    bus: Bus,
    clock: Clock,
    stop: asyncio.Event,
    tracing: Tracing,
    rng: Random,
    export: Export,
) -> None:
    metrics = Registry()
    export(metrics)
    if cfg.engine == "sim":
        runner = ThreadRunner(TurnTaker(*make(cfg)))
        try:
            await serve(cfg, bus, clock, runner, stop, tracing=tracing, rng=rng, metrics=metrics)
        finally:
            runner.close()
        return
    async with engine_process(cfg, stop) as engine:
        if engine is not None:
            await serve(cfg, bus, clock, engine, stop, tracing=tracing, rng=rng, metrics=metrics)


if __name__ == "__main__":
    run("worker", WorkerConfig, body)
