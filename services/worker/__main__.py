"""python -m services.worker"""

import asyncio
from random import Random

from services.worker.config import WorkerConfig
from services.worker.engine import Engine
from services.worker.engines.make import make
from services.worker.profiling import fit_engine
from services.worker.runner import ThreadRunner
from services.worker.service import serve
from shared.bus.api import Bus
from shared.clock import Clock
from shared.metrics import Registry
from shared.perf.store import ProfileFile
from shared.service import Export, run
from shared.telemetry import Tracing


async def body(cfg: WorkerConfig, bus: Bus, clock: Clock, stop: asyncio.Event, tracing: Tracing, rng: Random, export: Export) -> None:
    metrics = Registry()
    export(metrics)
    engine, tokenizer = await asyncio.to_thread(make, cfg)
    runner = ThreadRunner()
    try:
        fitted = await _measured(cfg, engine, stop)
        await serve(cfg, bus, clock, engine, tokenizer, runner, stop, tracing=tracing, rng=rng, metrics=metrics, fitted=fitted)
    finally:
        runner.close()
        engine.close()


async def _measured(cfg: WorkerConfig, engine: Engine, stop: asyncio.Event) -> ProfileFile | None:
    """A simulated engine has a profile already, an operator's word counts, and what is not known is measured."""
    if cfg.engine == "sim" or cfg.profile or not cfg.profile_s:
        return None
    return await asyncio.to_thread(fit_engine, engine, cfg.profile_s, give_up=stop.is_set)


if __name__ == "__main__":
    run("worker", WorkerConfig, body)
