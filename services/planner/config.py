"""The settings of a planner: section `planner`, or SLACKLINE_PLANNER_<FIELD>."""

from shared.policy import registry
from shared.process.configuration import Connected, Constant


class PlannerConfig(Connected, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = registry.DEFAULT
    """It plans each iteration, and its router says which replica is asked first."""
    settings: dict[str, str] = {}
    """Settings of the policy, each as text."""
    max_replicas: int = 64
    """Replicas that this planner leases at once."""
    drain_s: float = 5.0
    """The longest drain. The process ends within 5 s of it, whatever NATS does."""

    # ------------------------------------------------------------ constants

    # Plans in flight for each replica.
    depth: Constant[int] = 2
    # The first guess of how early a plan leaves. It adapts to the time that engines wait.
    lead_s: Constant[float] = 0.004
    # Relegated requests that have not begun go back to the pool.
    hand_back: Constant[bool] = True
    # The time between two digests of a replica.
    digest_s: Constant[float] = 0.1
    # The longest wait for a worker to hold a request. Then the offer is answered in doubt: the
    # planner resyncs, and admission withdraws the request there.
    hold_timeout_s: Constant[float] = 1.0
    # A worker without a heartbeat for this long is not planned for.
    lost_s: Constant[float] = 3.0
