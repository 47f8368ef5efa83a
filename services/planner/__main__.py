"""Runs a planner process: python -m services.planner"""

from services.planner.config import PlannerConfig
from services.planner.service import Planner
from shared.policy import registry
from shared.process.main import Process, run


async def body(process: Process[PlannerConfig]) -> None:
    planner = Planner(process.cfg, process.bus, process.clock, process.tracing, process.rng)
    process.export(planner.metrics)
    await planner.run(process.stop)


def check(cfg: PlannerConfig) -> None:
    """Check the policy at the start, not only at the first replica. Raises ConfigError."""
    registry.make(cfg.policy, cfg.settings)


if __name__ == "__main__":
    run("planner", PlannerConfig, body, check)
