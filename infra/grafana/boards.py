"""Writes the three Grafana boards: `python -m infra.grafana.boards`. A board is a list of panels, a
panel one question with its queries; the JSON beside this file is made from them.

`$tier` and `$replica` are chosen on the board.
"""

import json
from pathlib import Path
from typing import Any

from infra.grafana.panels import (
    Query,
    board,
    jaeger_search,
    legend,
    panel,
    quantiles,
    rate,
    ratio,
    summed,
)

HERE = Path(__file__).parent / "dashboards"
TIER, REPLICA = 'tier=~"$tier"', 'replica=~"$replica"'

# ---------------------------------------------------------------- SLO

MET = f'slackline_requests_total{{{TIER},verdict="met"}}'
ENDED = f'slackline_requests_total{{{TIER},verdict=~"met|missed"}}'
OFFERED = f"slackline_offered_total{{{TIER}}}"


def of_tier(metric: str, word: str = "") -> Query:
    return summed("tier", metric, TIER, word)


def latency(metric: str) -> tuple[Query, ...]:
    return quantiles(metric, TIER, "tier", exemplars=True)


SLO = board(
    "SLO",
    "What was promised, and what came of it, by tier.",
    ("tier", "slackline_offered_total"),
    panel(
        "Attainment over offered, in this range",
        "Requests that met their SLO, of all that asked for a place: refused and unfinished "
        "ones count against it.",
        "percentunit",
        Query(
            f"sum by (tier) (increase({MET}[$__range])) "
            f"/ sum by (tier) (increase({OFFERED}[$__range]))",
            "{{tier}}",
        ),
        newest=True,
        most=1,
    ),
    panel(
        "Attainment over offered",
        "The same over time, five minutes at a time.",
        "percentunit",
        Query(f"slackline:attainment_offered:ratio5m{{{TIER}}}", "{{tier}}"),
        most=1,
    ),
    panel(
        "Attainment over finished",
        "Of the requests that were finished alone: shedding looks like success here.",
        "percentunit",
        Query(f"sum by (tier) ({rate(MET)}) / sum by (tier) ({rate(ENDED)})", "{{tier}}"),
        most=1,
    ),
    panel(
        "Burn rate",
        "How many times faster than allowed the error budget (what the tier's objective leaves) "
        "is spent. Alerts: 14.4 over an hour, 6 over six hours.",
        "none",
        Query(f"slackline:burn:ratio5m{{{TIER}}}", "{{tier}} 5 min"),
        Query(f"slackline:burn:ratio1h{{{TIER}}}", "{{tier}} 1 h"),
        Query(f"slackline:burn:ratio6h{{{TIER}}}", "{{tier}} 6 h"),
    ),
    panel(
        "Attainment over offered, by model",
        "Requests that were refused unread are of no model.",
        "percentunit",
        Query(
            f"sum by (model_name) ({rate(MET)}) / sum by (model_name) ({rate(OFFERED)})",
            "{{model_name}}",
        ),
        most=1,
    ),
    panel(
        "Offered, by model",
        "Requests a second whose outcome became known.",
        "reqps",
        summed("model_name", "slackline_offered_total", TIER),
    ),
    panel(
        "Violations by kind",
        "The bound that was broken first; or unfinished, or refused for want of room.",
        "reqps",
        summed("tier, type", "slackline_slo_violation_total", TIER),
    ),
    panel(
        "Offered and goodput",
        "Requests a second whose outcome became known, and those of them that met their SLO.",
        "reqps",
        of_tier("slackline_offered_total", "offered"),
        of_tier("slackline_goodput_requests_total", "good"),
    ),
    panel(
        "Goodput in tokens",
        "Output tokens of requests that met their SLO.",
        "none",
        of_tier("slackline_goodput_tokens_total"),
    ),
    panel(
        "Relegated, by tier",
        "Requests that ended and were best-effort at some time.",
        "reqps",
        of_tier("slackline_relegated_total"),
    ),
    panel(
        "Relegated, by tenant",
        "The same by who asked; the 64 first tenants have lines of their own.",
        "reqps",
        summed("tenant", "slackline_tenant_relegated_total"),
    ),
    panel(
        "Best-effort pool",
        "Requests that no replica holds, and the best-effort ones that replicas hold.",
        "none",
        Query("sum(slackline_backlog_requests)", "in the pool"),
        Query("sum(slackline_best_effort_held)", "held"),
    ),
    panel(
        "Time to empty the pool",
        "At the speed with which replicas took work out of it of late.",
        "s",
        Query("sum(slackline_backlog_seconds)", "seconds"),
    ),
    panel(
        "Refused at the door",
        "By the code of OpenAI's error envelope.",
        "reqps",
        summed("code", "slackline_refused_total", TIER),
    ),
    panel(
        "Time to first token",
        "From arrival. The dots are traces.",
        "s",
        *latency("vllm:time_to_first_token_seconds"),
    ),
    panel(
        "Time per output token",
        "The mean of a request, after its first token.",
        "s",
        *latency("vllm:request_time_per_output_token_seconds"),
    ),
    panel(
        "Time to last token", "From arrival.", "s", *latency("slackline_time_to_last_token_seconds")
    ),
    panel(
        "Places beyond the first",
        "Replicas that a request was given to after its first: declined, moved or lost there.",
        "none",
        ratio("tier", "slackline_hops_sum", "slackline_hops_count", TIER),
    ),
    panel(
        "Requests by tenant",
        "Ended or refused, a second.",
        "reqps",
        summed("tenant, verdict", "slackline_tenant_requests_total"),
    ),
    panel(
        "Replicas",
        "Workers that are heard, as the admission that hears fewest has them.",
        "none",
        Query("min(slackline_replicas)", "heard"),
        Query("max(increase(slackline_replicas_lost_total[$__range]))", "lost"),
        newest=True,
    ),
)

# ---------------------------------------------------------------- Planner


def mean(histogram: str, word: str) -> Query:
    return ratio("replica", f"{histogram}_sum", f"{histogram}_count", REPLICA, word)


def of_replica(metric: str, word: str = "") -> Query:
    return summed("replica", metric, REPLICA, word)


def gauge(metric: str, word: str = "") -> Query:
    return Query(f"{metric}{{{REPLICA}}}", legend("replica", word))


def total(metric: str, word: str = "") -> Query:
    return Query(f"sum by (replica) ({metric}{{{REPLICA}}})", legend("replica", word))


def spread(metric: str, **more: Any) -> tuple[Query, ...]:
    return quantiles(metric, REPLICA, "replica", **more)


BUBBLE, BUSY = (
    of_replica(f"slackline_{name}_seconds_sum").expr for name in ("bubble", "iteration")
)
OVERDUE = f'{REPLICA},le=~"0|0.0"'
PREDICTED, MEASURED = "slackline_predicted_iteration_seconds", "slackline_iteration_seconds"

PLANNER = board(
    "planner",
    "What was planned for each replica, and what its engine did.",
    ("replica", "slackline_iteration_seconds_count"),
    panel(
        "Iteration: predicted and measured",
        "Means. A plan is made with the predicted time.",
        "s",
        mean(PREDICTED, "predicted"),
        mean(MEASURED, "measured"),
    ),
    panel(
        "Measured over predicted",
        "1: as predicted. Above, iterations take longer than planned.",
        "none",
        ratio("replica", f"{MEASURED}_sum", f"{PREDICTED}_sum", REPLICA),
    ),
    panel(
        "Error of the profile",
        "|measured - predicted| / measured, and the part of it that is not scatter.",
        "percentunit",
        gauge("slackline_profile_residual_ratio", "residual"),
        gauge("slackline_profile_bias_ratio", "bias"),
        least=None,
    ),
    panel(
        "Correction of the profile",
        "Iteration times over those of the profile, as plans now have them.",
        "none",
        gauge("slackline_profile_gamma_ratio", "{{regime}}"),
    ),
    panel("Iteration time", "By the engine's clock.", "s", *spread(MEASURED)),
    panel(
        "Slack",
        "Deadline of the next token that no plan has, minus now, of standard requests.",
        "s",
        *spread("slackline_slack_seconds", of=(0.01, 0.1, 0.5)),
        least=None,
    ),
    panel(
        "Late: slack below 0",
        "Share of the standard requests held whose next token is overdue.",
        "percentunit",
        Query(
            "sum by (replica) "
            f"({rate('slackline_slack_seconds_bucket', OVERDUE)}) "
            f"/ {of_replica('slackline_slack_seconds_count').expr}",
            "{{replica}}",
        ),
        most=1,
    ),
    panel(
        "Chunk",
        "Prefill tokens of an iteration that has any.",
        "none",
        *spread("slackline_chunk_tokens"),
    ),
    panel(
        "Tokens of an iteration",
        "Positions computed: chunks and decodes.",
        "none",
        *spread("vllm:iteration_tokens_total"),
    ),
    panel(
        "Bubble",
        "Share of the engine's time, while it held work, in which it waited for a plan.",
        "percentunit",
        Query(f"{BUBBLE} / ({BUBBLE} + {BUSY})", "{{replica}}"),
    ),
    panel(
        "Lead",
        "A plan leaves so long before the predicted end of the iteration that runs.",
        "s",
        gauge("slackline_lead_seconds"),
    ),
    panel(
        "Plan to iteration",
        "From sending a plan to the begin of its iteration: the way, and the wait there.",
        "s",
        *spread("slackline_plan_ahead_seconds"),
    ),
    panel(
        "Iteration to ack",
        "From the end of an iteration to its ack at the planner: stored, and sent.",
        "s",
        *spread("slackline_ack_latency_seconds"),
    ),
    panel(
        "A step of the planner",
        "Time of one step of a replica's core.",
        "s",
        *spread("slackline_plan_step_seconds"),
    ),
    panel(
        "KV cache",
        "Share of the blocks in use.",
        "percentunit",
        total("vllm:kv_cache_usage_perc"),
        most=1,
    ),
    panel(
        "Requests",
        "In the newest iteration, and held without being in it.",
        "none",
        total("vllm:num_requests_running", "running"),
        total("vllm:num_requests_waiting", "waiting"),
    ),
    panel(
        "Tokens a second",
        "Prefill and output.",
        "none",
        of_replica("vllm:prompt_tokens_total", "prompt"),
        of_replica("vllm:generation_tokens_total", "output"),
    ),
    panel(
        "Plans, resyncs, preemptions",
        "A second.",
        "ops",
        of_replica("slackline_plans_total", "plans"),
        of_replica("slackline_resyncs_total", "resyncs"),
        of_replica("vllm:num_preemptions_total", "preemptions"),
    ),
    panel(
        "Offers",
        "How planners answered admission and relegation.",
        "ops",
        summed("answer", "slackline_offers_total"),
    ),
    panel(
        "Queue",
        "Arrival to a request's first iteration.",
        "s",
        *spread("vllm:request_queue_time_seconds", exemplars=True),
    ),
    panel(
        "CPU of each process",
        "Cores.",
        "none",
        Query(rate("process_cpu_seconds_total"), "{{job}} {{instance}}"),
    ),
)

# ---------------------------------------------------------------- Traces

SPANS = "traces_span_metrics"
OF_SERVICE = 'service_name=~"$service_name"'
STEP = "service_name, span_name"


def span_quantile(q: float) -> Query:
    rows = rate(f"{SPANS}_duration_seconds_bucket", OF_SERVICE)
    return Query(
        f"histogram_quantile({q}, sum by (le, {STEP}) ({rows}))", legend(STEP), exemplars=True
    )


def spans(more: str = "") -> Query:
    return summed(STEP, f"{SPANS}_calls_total", OF_SERVICE + more)


TRACES = board(
    "traces",
    "Where the time of requests goes, by service and step, from the spans that the collector "
    "counts. It needs traces: OTEL_TRACES_EXPORTER=otlp.",
    ("service_name", f"{SPANS}_calls_total"),
    panel("Steps, p50", "The median of each span.", "s", span_quantile(0.5)),
    panel("Steps, p99", "The dots are traces.", "s", span_quantile(0.99)),
    panel("Spans", "Spans a second: requests that were sampled, and their steps.", "ops", spans()),
    panel(
        "Spans that failed",
        "By service and step.",
        "ops",
        spans(',status_code="STATUS_CODE_ERROR"'),
    ),
    panel(
        "Violated requests that were traced",
        "Spans that say that the SLO was not met.",
        "ops",
        spans(',slackline_slo_met="false"'),
    ),
    panel(
        "Time to first token",
        "From the services' own metrics; a dot opens the trace of its request.",
        "s",
        *quantiles("vllm:time_to_first_token_seconds", "", "tier", exemplars=True),
    ),
    jaeger_search(
        "The slowest violated requests",
        "Traces of requests that did not meet their SLO.",
        "slackline.slo_met=false",
    ),
)

BOARDS = {"slo": SLO, "planner": PLANNER, "traces": TRACES}


def texts() -> dict[str, str]:
    """The JSON of each board by the name of its file."""
    return {f"{name}.json": json.dumps(of, indent=1) + "\n" for name, of in BOARDS.items()}


if __name__ == "__main__":
    for name, text in texts().items():
        (HERE / name).write_text(text)
