"""Exports the metrics of a planner: the numbers of each replica that it plans for."""

from collections.abc import Sequence

from shared.core.replica.replica import ReplicaCore
from shared.perf.online import Regime
from shared.schemas import PlanAck
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Counter, Family, Gauge, Histogram, Registry
from shared.vocabulary import ReplicaId

FLIGHTS_LIMIT = 64  # plans whose ack is awaited; a replica planner has a few in flight
REPLICA_LIMIT = 256  # replicas with numbers of their own; the rest share one set


class PlannerMetrics:
    """The metrics of one process; each replica planner has a `Watch` on them."""

    def __init__(self, registry: Registry) -> None:
        labels, caps, step = ("replica",), {"replica": REPLICA_LIMIT}, names.STEP_BUCKETS_S

        def gauge(name: str, text: str, *more: str) -> Family[Gauge]:
            return registry.gauge(name, text, (*labels, *more), caps)

        def counter(name: str, text: str) -> Family[Counter]:
            return registry.counter(name, text, labels, caps)

        def histogram(name: str, text: str, bounds: Sequence[float] = step) -> Family[Histogram]:
            return registry.histogram(name, text, bounds, labels, caps)

        self._residual = gauge(
            names.RESIDUAL, "|measured - predicted| / measured, corrected and smoothed."
        )
        self._bias = gauge(
            names.BIAS,
            "(measured - predicted) / measured of late iterations together: "
            "the part of the residual that is not scatter.",
        )
        text = (
            "Iteration times over those of the replica's profile, as the correction now has them."
        )
        self._gamma = gauge(names.GAMMA, text, "regime")
        self._plans = counter(names.PLANS, "Plans sent.")
        self._acks = counter(names.ACKS, "Acks of iterations digested.")
        self._resyncs = counter(names.RESYNCS, "Resyncs begun.")
        self._expected = counter(
            names.PREFIX_EXPECTED, "Tokens of prompts that were expected in the prefix cache."
        )
        self._found = counter(names.PREFIX_FOUND, "Tokens of prompts that were found there.")
        self._steps = histogram(names.PLAN_STEP, "Time of one step of a replica's core.")
        self._slack = histogram(
            names.SLACK,
            "Deadline of the next token that no plan has, minus now: of each standard request, "
            "ten times a second.",
            names.SLACK_BUCKETS_S,
        )
        self._ahead = histogram(
            names.PLAN_AHEAD, "From sending a plan to the begin of its iteration."
        )
        self._latency = histogram(
            names.ACK_LATENCY, "From the end of an iteration to its ack here: stored, and sent."
        )
        self._lead = gauge(
            names.LEAD, "A plan leaves so long before the predicted end of the iteration that runs."
        )
        self._best_effort = gauge(
            names.BEST_EFFORT_HELD, "Best-effort requests that the replica holds."
        )


class Watch:
    """The numbers of a replica planner: its core counts from 0, the metrics go on."""

    def __init__(self, metrics: PlannerMetrics, replica: ReplicaId, core: ReplicaCore) -> None:
        self._core = core
        self._residual = metrics._residual.labels(replica)
        self._bias = metrics._bias.labels(replica)
        self._gammas = [
            (regime, metrics._gamma.labels(replica, regime.name.lower())) for regime in Regime
        ]
        counted = [metrics._plans, metrics._acks, metrics._resyncs]
        counted += [metrics._expected, metrics._found]
        self._counters = [family.labels(replica) for family in counted]
        self._shown = [0] * len(counted)
        self._steps = metrics._steps.labels(replica)
        self._slack = metrics._slack.labels(replica)
        self._ahead = metrics._ahead.labels(replica)
        self._latency = metrics._latency.labels(replica)
        self._lead = metrics._lead.labels(replica)
        self._best_effort = metrics._best_effort.labels(replica)
        self._sent_unix_s: dict[int, float] = {}  # of the plans in flight, by seq

    def sent(self, seq: int, now_unix_s: float) -> None:
        self._sent_unix_s[seq] = now_unix_s
        if len(self._sent_unix_s) > FLIGHTS_LIMIT:  # acks of a lost worker never come
            self._sent_unix_s = {seq: now_unix_s}

    def acked(self, ack: PlanAck, now_unix_s: float) -> None:
        sent_unix_s = self._sent_unix_s.pop(ack.plan_seq, None)
        if sent_unix_s is None or not ack.ended_unix_s:
            return
        self._ahead.observe(max(ack.started_unix_s - sent_unix_s, 0.0))
        self._latency.observe(max(now_unix_s - ack.ended_unix_s, 0.0))

    def leave(self) -> None:
        """Show no best-effort requests any more: another planner may show them from now on."""
        self._best_effort.set(0)

    def step(self, seconds: float) -> None:
        self._steps.observe(seconds)

    def show(self, now_unix_s: float) -> None:
        """Bring every number up to date."""
        core = self._core
        figures = core.figures(now_unix_s)
        for slack_s in figures.slacks_s:
            self._slack.observe(slack_s)
        self._lead.set(figures.lead_s)
        self._best_effort.set(figures.best_effort)
        self._residual.set(figures.residual)
        self._bias.set(figures.bias)
        for regime, gauge in self._gammas:
            gauge.set(figures.gammas[regime])
        done = core.counters
        now = [done.plans, done.acks, done.resyncs, done.expected_tokens, done.found_tokens]
        for counter, count, before in zip(self._counters, now, self._shown, strict=True):
            counter.add(count - before)
        self._shown = now
