"""Runs a relegation process: python -m services.relegation"""

from services.relegation.config import RelegationConfig
from services.relegation.service import Relegation
from shared.process.main import Process, run


async def body(process: Process[RelegationConfig]) -> None:
    relegation = Relegation(process.cfg, process.bus, process.clock, process.tracing, process.rng)
    process.export(relegation.metrics)
    await relegation.run(process.stop)


if __name__ == "__main__":
    run("relegation", RelegationConfig, body)
