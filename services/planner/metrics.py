"""The metrics of a planner: numbers of each replica it plans for."""

from shared.core.replica.replica import ReplicaCore
from shared.perf.online import Regime
from shared.schemas import PlanAck
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry
from shared.vocabulary import ReplicaId

FLIGHTS_LIMIT = 64  # plans whose ack is awaited; a replica planner has a few in flight
REPLICA_LIMIT = 256  # replicas with numbers of their own; the rest share one set


class PlannerMetrics:
    """The metrics of one process; each replica planner has a `Watch` on them."""

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

        self._slack = registry.histogram(
            names.SLACK,
            "Deadline of the next token that no plan has, minus now: of each standard request, "
            "ten times a second.",
            names.SLACK_BUCKETS_S,
            labels,
            caps,
        )
        self._ahead = registry.histogram(
            names.PLAN_AHEAD,
            "From sending a plan to the begin of its iteration.",
            names.STEP_BUCKETS_S,
            labels,
            caps,
        )
        self._latency = registry.histogram(
            names.ACK_LATENCY,
            "From the end of an iteration to its ack here: stored, and sent.",
            names.STEP_BUCKETS_S,
            labels,
            caps,
        )
        self._lead = registry.gauge(
            names.LEAD,
            "A plan leaves so long before the predicted end of the iteration that runs.",
            labels,
            caps,
        )
        self._best_effort = registry.gauge(
            names.BEST_EFFORT_HELD, "Best-effort requests that the replica holds.", labels, caps
        )

    def watch(self, replica: ReplicaId, core: ReplicaCore) -> "Watch":
        return Watch(self, replica, core)


class Watch:
    """The numbers of one replica planner. Its core counts from 0; the metrics go on from where they
    were.
    """

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
        self._slack = metrics._slack.labels(replica)
        self._ahead = metrics._ahead.labels(replica)
        self._latency = metrics._latency.labels(replica)
        self._lead = metrics._lead.labels(replica)
        self._best_effort = metrics._best_effort.labels(replica)
        self._sent_unix_s: dict[int, float] = {}  # of the plans in flight, by seq

    def sent(self, seq: int, now_unix_s: float) -> None:
        """A plan leaves."""
        self._sent_unix_s[seq] = now_unix_s
        if len(self._sent_unix_s) > FLIGHTS_LIMIT:  # acks of a lost worker never come
            self._sent_unix_s = {seq: now_unix_s}

    def acked(self, ack: PlanAck, now_unix_s: float) -> None:
        """An ack is here."""
        sent_unix_s = self._sent_unix_s.pop(ack.plan_seq, None)
        if sent_unix_s is None or not ack.ended_unix_s:
            return
        self._ahead.observe(max(ack.started_unix_s - sent_unix_s, 0.0))
        self._latency.observe(max(now_unix_s - ack.ended_unix_s, 0.0))

    def leave(self) -> None:
        """Another planner may show what the replica holds from now on."""
        self._best_effort.set(0)

    def step(self, seconds: float) -> None:
        self._steps.observe(seconds)

    def show(self, now_unix_s: float) -> None:
        """Bring every number up to date."""
        core = self._core
        for slack_s in core.slacks_s(now_unix_s):
            self._slack.observe(slack_s)
        self._lead.set(core.lead_s)
        self._best_effort.set(core.best_effort)
        self._residual.set(core.residual)
        self._bias.set(core.bias)
        gammas = core.gammas
        for regime, gauge in self._gammas:
            gauge.set(gammas[regime])
        now = (core.counters.plans, core.counters.acks, core.counters.resyncs)
        for counter, count, before in zip(self._counters, now, self._shown, strict=True):
            counter.add(count - before)
        self._shown = now
