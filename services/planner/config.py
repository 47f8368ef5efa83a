"""The settings of a planner: section `planner`, or SLACKLINE_PLANNER_<FIELD>."""

import msgspec

from shared.policy import registry


class PlannerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "nats://127.0.0.1:4222"
    creds: str = ""  # file of its seed (or JWT and seed) at NATS; empty: it logs in without
    tls_ca: str = ""  # file of the authority to trust at NATS; empty: those of the system
    policy: str = registry.DEFAULT
    settings: dict[str, str] = {}  # settings of the policy
    max_replicas: int = 64  # replicas that this planner leases at once
    depth: int = 2  # plans in flight per replica
    lead_s: float = 0.004  # the first guess; the lead adapts to the measured idle time
    hand_back: bool = True  # relegated requests that have not begun go to the relegation service
    digest_s: float = 0.1
    hold_timeout_s: float = 1.0
    lost_s: float = 3.0  # a worker without a heartbeat for this long is not planned for
    drain_s: float = 5.0
