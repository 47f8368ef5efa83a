"""python -m services.planner"""

from services.planner.config import PlannerConfig
from services.planner.service import Planner
from shared.policy import registry
from shared.process.main import Process, run


async def body(process: Process[PlannerConfig]) -> None:
    cfg = process.cfg
    # a policy that does not exist stops the start, not the first seat
    registry.make(cfg.policy, cfg.settings)
    planner = Planner(cfg, process.bus, process.clock, process.tracing, process.rng)
    process.export(planner.metrics)
    await planner.run(process.stop)


if __name__ == "__main__":
    run("planner", PlannerConfig, body)
