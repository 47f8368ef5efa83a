"""The metrics of a planner: numbers of each replica it plans for."""

from shared.core.replica import ReplicaCore
from shared.perf.online import Regime
from shared.process import conventions as names
from shared.process.instruments import Registry
from shared.vocabulary import ReplicaId

REPLICA_LIMIT = 256  # replicas with numbers of their own; the rest share one set


class PlannerMetrics:
    """The metrics of one process; each seat has a `Watch` on them."""

    def __init__(self, registry: Registry) -> None:
        labels, caps = ("replica",), {"replica": REPLICA_LIMIT}
        self._residual = registry.gauge(
            names.RESIDUAL,
            "|measured - predicted| / measured, corrected and smoothed.",
            labels,
            caps,
        )
        text = (
            "(measured - predicted) / measured of late iterations together: "
            "the part of the residual that is not scatter."
        )
        self._bias = registry.gauge(names.BIAS, text, labels, caps)
        text = (
            "Iteration times over those of the replica's profile, as the correction now has them."
        )
        self._gamma = registry.gauge(names.GAMMA, text, (*labels, "regime"), caps)
        self._plans = registry.counter(names.PLANS, "Plans sent.", labels, caps)
        self._acks = registry.counter(names.ACKS, "Acks of iterations digested.", labels, caps)
        self._resyncs = registry.counter(names.RESYNCS, "Resyncs begun.", labels, caps)
        self._steps = registry.histogram(
            names.PLAN_STEP,
            "Time of one step of a replica's core.",
            names.STEP_BUCKETS_S,
            labels,
            caps,
        )

    def watch(self, replica: ReplicaId, core: ReplicaCore) -> "Watch":
        return Watch(self, replica, core)


class Watch:
    """The numbers of one seat. Its core counts from 0; the metrics go on from where they were."""

    def __init__(self, metrics: PlannerMetrics, replica: ReplicaId, core: ReplicaCore) -> None:
        self._core = core
        self._residual = metrics._residual.labels(replica)
        self._bias = metrics._bias.labels(replica)
        self._gammas = [
            (regime, metrics._gamma.labels(replica, regime.name.lower())) for regime in Regime
        ]
        self._counters = [
            metrics._plans.labels(replica),
            metrics._acks.labels(replica),
            metrics._resyncs.labels(replica),
        ]
        self._shown = (0, 0, 0)
        self._steps = metrics._steps.labels(replica)

    def step(self, seconds: float) -> None:
        self._steps.observe(seconds)

    def show(self) -> None:
        """Bring every number up to date."""
        core = self._core
        self._residual.set(core.residual)
        self._bias.set(core.bias)
        gammas = core.gammas
        for regime, gauge in self._gammas:
            gauge.set(gammas[regime])
        now = (core.counters.plans, core.counters.acks, core.counters.resyncs)
        for counter, count, before in zip(self._counters, now, self._shown, strict=True):
            counter.add(count - before)
        self._shown = now
