"""Runs a worker: python -m services.worker"""

from services.worker.config import WorkerConfig
from services.worker.engine_process import engine_process
from services.worker.engines.make import make
from services.worker.kv.mover import KvMover
from services.worker.runner import Runner, ThreadRunner
from services.worker.service import serve
from services.worker.step_runner import StepRunner
from shared.process.main import Process, run
from shared.telemetry.instruments import Registry


async def body(process: Process[WorkerConfig]) -> None:
    cfg, metrics = process.cfg, Registry()
    process.export(metrics)

    async def serve_with(runner: Runner) -> None:
        mover = KvMover(runner, cfg)
        try:
            await mover.start()
            await serve(
                cfg,
                process.bus,
                process.clock,
                runner,
                process.stop,
                tracing=process.tracing,
                rng=process.rng,
                metrics=metrics,
                mover=mover,
            )
        finally:
            await mover.close()

    if cfg.engine == "sim":
        runner = ThreadRunner(StepRunner(*make(cfg)))
        try:
            await serve_with(runner)
        finally:
            runner.close()
        return
    async with engine_process(cfg, process.stop) as engine:
        if engine is not None:
            await serve_with(engine)


if __name__ == "__main__":
    run("worker", WorkerConfig, body)
