"""python -m services.worker"""

import asyncio
from random import Random

from services.worker.config import WorkerConfig
from services.worker.engines.make import make
from services.worker.runner import ThreadRunner
from services.worker.service import serve
from shared.bus.api import Bus
from shared.clock import Clock
from shared.service import run
from shared.telemetry import Tracing


async def body(cfg: WorkerConfig, bus: Bus, clock: Clock, stop: asyncio.Event, tracing: Tracing, rng: Random) -> None:
    engine, tokenizer = await asyncio.to_thread(make, cfg)
    runner = ThreadRunner()
    try:
        await serve(cfg, bus, clock, engine, tokenizer, runner, stop, tracing=tracing, rng=rng)
    finally:
        runner.close()
        engine.close()


if __name__ == "__main__":
    run("worker", WorkerConfig, body)
