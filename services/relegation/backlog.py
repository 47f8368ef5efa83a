"""The best-effort pool as gauges. The instance that leads shows it; one that stands by shows 0."""

from shared.schemas import PoolDigest
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry


class Backlog:
    """The work that waits in the pool, and the time that the fleet needs for it at its speed."""

    def __init__(self, metrics: Registry) -> None:
        self._requests = metrics.gauge(
            names.POOL_REQUESTS, "Requests in the best-effort pool."
        ).labels()
        self._tokens = metrics.gauge(
            names.POOL_TOKENS, "Their work: prompt and longest output."
        ).labels()
        self._wait = metrics.gauge(
            names.POOL_WAIT, "Time that the fleet needs for it, at its speed of late."
        ).labels()

    def show(self, digest: PoolDigest | None) -> None:
        """`digest`: of the instance that leads."""
        lanes = [] if digest is None else digest.lanes
        tokens = sum(lane.tokens for lane in lanes)
        self._requests.set(sum(lane.requests for lane in lanes))
        self._tokens.set(tokens)
        tokens_s = 0.0 if digest is None else digest.tokens_s
        self._wait.set(tokens / tokens_s if tokens and tokens_s else 0.0)
