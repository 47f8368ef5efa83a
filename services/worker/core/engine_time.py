"""Counts the engine's time: totals for heartbeats, and one iteration's seconds by their causes."""

from dataclasses import dataclass

from shared.core.record.time_accounting import Spent
from shared.schemas import BatchPlan


@dataclass(slots=True)
class WorkerCounters:
    """Times of the engine, as the heartbeat tells them."""

    exec_s: float = 0.0
    idle_s: float = 0.0
    late_s: float = 0.0
    predicted_s: float = 0.0


def spent_in(plan: BatchPlan, ended_unix_s: float, exec_s: float, drafted_s: float) -> Spent:
    """The iteration's seconds, split in the shares that the planner predicted. Drafting has the
    time that the engine measured (`drafted_s`; 0: it measured none).
    """
    scale = exec_s / plan.predicted_s if plan.predicted_s > 0.0 else 0.0
    return Spent(ended_unix_s, exec_s, plan.decodes_s * scale, drafted_s or plan.drafts_s * scale)
