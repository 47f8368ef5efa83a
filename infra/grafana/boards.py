"""Writes the three Grafana boards: `python infra/grafana/boards.py`. A board is a list of panels, a
panel one question with its queries; the JSON beside this file is made from them.

Queries of rates use Grafana's $__rate_interval. `$tier` and `$replica` are chosen on the board.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "dashboards"
PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}  # as provisioning/datasources has them
JAEGER = {"type": "jaeger", "uid": "jaeger"}
WIDTH, HEIGHT = 8, 8  # of a panel; a board is 24 wide

TIER, REPLICA = 'tier=~"$tier"', 'replica=~"$replica"'


@dataclass(frozen=True)
class Query:
    """PromQL, and the legend of its lines. `exemplars`: show traces as dots."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """`kind` is Grafana's; `unit` one of its units; a stat shows the newest numbers alone."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    most: float | None = None


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    text: str
    variables: dict[str, str]  # name to the PromQL selector whose label of that name it lists
    panels: tuple[Panel | dict[str, Any], ...]


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def quantiles(
    metric: str, labels: str, by: str = "", legend: str = "", *, exemplars: bool = False
) -> tuple[Query, ...]:
    """The median and the 99th percentile of a histogram, by these labels."""
    group = f"le, {by}" if by else "le"
    rows = f"sum by ({group}) ({rate(f'{metric}_bucket{{{labels}}}')})"
    return tuple(
        Query(f"histogram_quantile({q}, {rows})", f"p{q * 100:g} {legend}".strip(), exemplars)
        for q in (0.5, 0.99)
    )


def share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


# ---------------------------------------------------------------- SLO

MET = f'slackline_requests_total{{{TIER},verdict="met"}}'
ENDED = f'slackline_requests_total{{{TIER},verdict=~"met|missed"}}'
OFFERED = f"slackline_offered_total{{{TIER}}}"

SLO = Board(
    "slackline-slo",
    "Slackline: SLO",
    "What was promised, and what came of it, by tier.",
    {"tier": "slackline_offered_total"},
    (
        Panel(
            "Attainment over offered, in this range",
            "Requests that met their SLO, of all that asked for a place: refused and unfinished "
            "ones count against it.",
            "percentunit",
            (
                Query(
                    f"sum by (tier) (increase({MET}[$__range])) "
                    f"/ sum by (tier) (increase({OFFERED}[$__range]))",
                    "{{tier}}",
                ),
            ),
            "stat",
            1,
        ),
        Panel(
            "Attainment over offered",
            "The same over time, five minutes at a time.",
            "percentunit",
            (Query(f"slackline:attainment_offered:ratio5m{{{TIER}}}", "{{tier}}"),),
            most=1,
        ),
        Panel(
            "Attainment over finished",
            "Of the requests that were finished alone: shedding looks like success here.",
            "percentunit",
            (
                Query(
                    share(f"sum by (tier) ({rate(MET)})", f"sum by (tier) ({rate(ENDED)})"),
                    "{{tier}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Burn rate",
            "How many times faster than allowed the error budget (1 % of the offered requests) is "
            "spent. Alerts: 14.4 over an hour, 6 over six hours.",
            "none",
            (
                Query(f"slackline:burn:ratio5m{{{TIER}}}", "{{tier}} 5 min"),
                Query(f"slackline:burn:ratio1h{{{TIER}}}", "{{tier}} 1 h"),
                Query(f"slackline:burn:ratio6h{{{TIER}}}", "{{tier}} 6 h"),
            ),
        ),
        Panel(
            "Violations by kind",
            "The bound that was broken first; or unfinished, or refused for want of room.",
            "reqps",
            (
                Query(
                    f"sum by (tier, type) ({rate(f'slackline_slo_violation_total{{{TIER}}}')})",
                    "{{tier}} {{type}}",
                ),
            ),
        ),
        Panel(
            "Offered and goodput",
            "Requests a second whose outcome became known, and those of them that met their SLO.",
            "reqps",
            (
                Query(f"sum by (tier) ({rate(OFFERED)})", "{{tier}} offered"),
                Query(
                    f"sum by (tier) ({rate(f'slackline_goodput_requests_total{{{TIER}}}')})",
                    "{{tier}} good",
                ),
            ),
        ),
        Panel(
            "Goodput in tokens",
            "Output tokens of requests that met their SLO.",
            "none",
            (
                Query(
                    f"sum by (tier) ({rate(f'slackline_goodput_tokens_total{{{TIER}}}')})",
                    "{{tier}}",
                ),
            ),
        ),
        Panel(
            "Relegated, by tier",
            "Requests that ended and were best-effort at some time.",
            "reqps",
            (Query(f"sum by (tier) ({rate(f'slackline_relegated_total{{{TIER}}}')})", "{{tier}}"),),
        ),
        Panel(
            "Relegated, by tenant",
            "The same by who asked; the 64 first tenants have lines of their own.",
            "reqps",
            (Query(f"sum by (tenant) ({rate('slackline_tenant_relegated_total')})", "{{tenant}}"),),
        ),
        Panel(
            "Best-effort pool",
            "Requests that no replica holds, and the best-effort ones that replicas hold.",
            "none",
            (
                Query("sum(slackline_backlog_requests)", "in the pool"),
                Query("sum(slackline_best_effort_held)", "held"),
            ),
        ),
        Panel(
            "Time to empty the pool",
            "At the speed with which replicas took work out of it of late.",
            "s",
            (Query("sum(slackline_backlog_seconds)", "seconds"),),
        ),
        Panel(
            "Refused at the door",
            "By the code of OpenAI's error envelope.",
            "reqps",
            (Query(f"sum by (code) ({rate(f'slackline_refused_total{{{TIER}}}')})", "{{code}}"),),
        ),
        Panel(
            "Time to first token",
            "From arrival. The dots are traces.",
            "s",
            quantiles("vllm:time_to_first_token_seconds", TIER, "tier", "{{tier}}", exemplars=True),
        ),
        Panel(
            "Time per output token",
            "The mean of a request, after its first token.",
            "s",
            quantiles(
                "vllm:request_time_per_output_token_seconds",
                TIER,
                "tier",
                "{{tier}}",
                exemplars=True,
            ),
        ),
        Panel(
            "Time to last token",
            "From arrival.",
            "s",
            quantiles(
                "slackline_time_to_last_token_seconds", TIER, "tier", "{{tier}}", exemplars=True
            ),
        ),
        Panel(
            "Places beyond the first",
            "Replicas that a request was given to after its first: declined, moved or lost there.",
            "none",
            (
                Query(
                    share(
                        f"sum by (tier) ({rate(f'slackline_hops_sum{{{TIER}}}')})",
                        f"sum by (tier) ({rate(f'slackline_hops_count{{{TIER}}}')})",
                    ),
                    "{{tier}}",
                ),
            ),
        ),
        Panel(
            "Requests by tenant",
            "Ended or refused, a second.",
            "reqps",
            (
                Query(
                    f"sum by (tenant, verdict) ({rate('slackline_tenant_requests_total')})",
                    "{{tenant}} {{verdict}}",
                ),
            ),
        ),
        Panel(
            "Replicas",
            "Workers that are heard, as the admission that hears fewest has them.",
            "none",
            (
                Query("min(slackline_replicas)", "heard"),
                Query("max(increase(slackline_replicas_lost_total[$__range]))", "lost"),
            ),
            "stat",
        ),
    ),
)

# ---------------------------------------------------------------- Planner


def of_replica(metric: str) -> str:
    return f"{metric}{{{REPLICA}}}"


def mean(metric: str) -> str:
    """The mean of a histogram, by replica."""
    return share(
        f"sum by (replica) ({rate(of_replica(f'{metric}_sum'))})",
        f"sum by (replica) ({rate(of_replica(f'{metric}_count'))})",
    )


def by_replica(metric: str, *, is_rate: bool = False) -> tuple[Query, ...]:
    series = rate(of_replica(metric)) if is_rate else of_replica(metric)
    return (Query(f"sum by (replica) ({series})", "{{replica}}"),)


BUBBLE, BUSY = (
    f"sum by (replica) ({rate(of_replica(f'slackline_{name}_seconds_sum'))})"
    for name in ("bubble", "iteration")
)

PLANNER = Board(
    "slackline-planner",
    "Slackline: planner",
    "What was planned for each replica, and what its engine did.",
    {"replica": "slackline_iteration_seconds_count"},
    (
        Panel(
            "Iteration: predicted and measured",
            "Means. A plan is made with the predicted time.",
            "s",
            (
                Query(mean("slackline_predicted_iteration_seconds"), "{{replica}} predicted"),
                Query(mean("slackline_iteration_seconds"), "{{replica}} measured"),
            ),
        ),
        Panel(
            "Measured over predicted",
            "1: as predicted. Above, iterations take longer than planned.",
            "none",
            (
                Query(
                    share(
                        BUSY,
                        "sum by (replica) "
                        f"({rate(of_replica('slackline_predicted_iteration_seconds_sum'))})",
                    ),
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Error of the profile",
            "|measured - predicted| / measured, and the part of it that is not scatter.",
            "percentunit",
            (
                Query(of_replica("slackline_profile_residual_ratio"), "{{replica}} residual"),
                Query(of_replica("slackline_profile_bias_ratio"), "{{replica}} bias"),
            ),
        ),
        Panel(
            "Correction of the profile",
            "Iteration times over those of the profile, as plans now have them.",
            "none",
            (Query(of_replica("slackline_profile_gamma_ratio"), "{{replica}} {{regime}}"),),
        ),
        Panel(
            "Iteration time",
            "By the engine's clock.",
            "s",
            quantiles("slackline_iteration_seconds", REPLICA, "replica", "{{replica}}"),
        ),
        Panel(
            "Slack",
            "Deadline of the next token that no plan has, minus now, of standard requests.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({q}, sum by (le, replica) "
                    f"({rate(of_replica('slackline_slack_seconds_bucket'))}))",
                    f"p{q * 100:g} {{{{replica}}}}",
                )
                for q in (0.01, 0.1, 0.5)
            ),
        ),
        Panel(
            "Late: slack below 0",
            "Share of the standard requests held whose next token is overdue.",
            "percentunit",
            (
                Query(
                    share(
                        "sum by (replica) (rate(slackline_slack_seconds_bucket"
                        f'{{{REPLICA},le=~"0|0.0"}}[$__rate_interval]))',
                        f"sum by (replica) ({rate(of_replica('slackline_slack_seconds_count'))})",
                    ),
                    "{{replica}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Chunk",
            "Prefill tokens of an iteration that has any.",
            "none",
            quantiles("slackline_chunk_tokens", REPLICA, "replica", "{{replica}}"),
        ),
        Panel(
            "Tokens of an iteration",
            "Positions computed: chunks and decodes.",
            "none",
            quantiles("vllm:iteration_tokens_total", REPLICA, "replica", "{{replica}}"),
        ),
        Panel(
            "Bubble",
            "Share of the engine's time, while it held work, in which it waited for a plan.",
            "percentunit",
            (Query(share(BUBBLE, f"({BUBBLE} + {BUSY})"), "{{replica}}"),),
        ),
        Panel(
            "Lead",
            "A plan leaves so long before the predicted end of the iteration that runs.",
            "s",
            (Query(of_replica("slackline_lead_seconds"), "{{replica}}"),),
        ),
        Panel(
            "Plan to iteration",
            "From sending a plan to the begin of its iteration: the way, and the wait there.",
            "s",
            quantiles("slackline_plan_ahead_seconds", REPLICA, "replica", "{{replica}}"),
        ),
        Panel(
            "Iteration to ack",
            "From the end of an iteration to its ack at the planner: stored, and sent.",
            "s",
            quantiles("slackline_ack_latency_seconds", REPLICA, "replica", "{{replica}}"),
        ),
        Panel(
            "A step of the planner",
            "Time of one step of a replica's core.",
            "s",
            quantiles("slackline_plan_step_seconds", REPLICA, "replica", "{{replica}}"),
        ),
        Panel(
            "KV cache",
            "Share of the blocks in use.",
            "percentunit",
            by_replica("vllm:kv_cache_usage_perc"),
            most=1,
        ),
        Panel(
            "Requests",
            "In the newest iteration, and held without being in it.",
            "none",
            (
                Query(
                    f"sum by (replica) ({of_replica('vllm:num_requests_running')})",
                    "{{replica}} running",
                ),
                Query(
                    f"sum by (replica) ({of_replica('vllm:num_requests_waiting')})",
                    "{{replica}} waiting",
                ),
            ),
        ),
        Panel(
            "Tokens a second",
            "Prefill and output.",
            "none",
            (
                Query(
                    f"sum by (replica) ({rate(of_replica('vllm:prompt_tokens_total'))})",
                    "{{replica}} prompt",
                ),
                Query(
                    f"sum by (replica) ({rate(of_replica('vllm:generation_tokens_total'))})",
                    "{{replica}} output",
                ),
            ),
        ),
        Panel(
            "Plans, resyncs, preemptions",
            "A second.",
            "ops",
            (
                Query(
                    f"sum by (replica) ({rate(of_replica('slackline_plans_total'))})",
                    "{{replica}} plans",
                ),
                Query(
                    f"sum by (replica) ({rate(of_replica('slackline_resyncs_total'))})",
                    "{{replica}} resyncs",
                ),
                Query(
                    f"sum by (replica) ({rate(of_replica('vllm:num_preemptions_total'))})",
                    "{{replica}} preemptions",
                ),
            ),
        ),
        Panel(
            "Offers",
            "How planners answered admission and relegation.",
            "ops",
            (Query(f"sum by (answer) ({rate('slackline_offers_total')})", "{{answer}}"),),
        ),
        Panel(
            "Queue",
            "Arrival to a request's first iteration.",
            "s",
            quantiles(
                "vllm:request_queue_time_seconds", REPLICA, "replica", "{{replica}}", exemplars=True
            ),
        ),
        Panel(
            "CPU of each process",
            "Cores.",
            "none",
            (Query(rate("process_cpu_seconds_total"), "{{job}} {{instance}}"),),
        ),
    ),
)

# ---------------------------------------------------------------- Traces

SPANS = "traces_span_metrics"
OF_SERVICE = 'service_name=~"$service_name"'
STEP = "service_name, span_name"


def span_quantile(q: float) -> Query:
    rows = rate(f"{SPANS}_duration_seconds_bucket{{{OF_SERVICE}}}")
    return Query(
        f"histogram_quantile({q}, sum by (le, {STEP}) ({rows}))",
        "{{service_name}} {{span_name}}",
        exemplars=True,
    )


def jaeger_search(title: str, text: str, tags: str) -> dict[str, Any]:
    """A table of traces, the longest first."""
    return {
        "type": "table",
        "title": title,
        "description": text,
        "datasource": JAEGER,
        "targets": [
            {
                "refId": "A",
                "datasource": JAEGER,
                "queryType": "search",
                "service": "admission",
                "tags": tags,
                "limit": 50,
            }
        ],
        "transformations": [
            {"id": "sortBy", "options": {"sort": [{"field": "Duration", "desc": True}]}}
        ],
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {"showHeader": True},
    }


TRACES = Board(
    "slackline-traces",
    "Slackline: traces",
    "Where the time of requests goes, by service and step, from the spans that the collector "
    "counts. It needs traces: OTEL_TRACES_EXPORTER=otlp.",
    {"service_name": f"{SPANS}_calls_total"},
    (
        Panel("Steps, p50", "The median of each span.", "s", (span_quantile(0.5),)),
        Panel("Steps, p99", "The dots are traces.", "s", (span_quantile(0.99),)),
        Panel(
            "Spans",
            "Spans a second: requests that were sampled, and their steps.",
            "ops",
            (
                Query(
                    f"sum by ({STEP}) ({rate(f'{SPANS}_calls_total{{{OF_SERVICE}}}')})",
                    "{{service_name}} {{span_name}}",
                ),
            ),
        ),
        Panel(
            "Spans that failed",
            "By service and step.",
            "ops",
            (
                Query(
                    f"sum by ({STEP}) (rate({SPANS}_calls_total"
                    f'{{{OF_SERVICE},status_code="STATUS_CODE_ERROR"}}[$__rate_interval]))',
                    "{{service_name}} {{span_name}}",
                ),
            ),
        ),
        Panel(
            "Violated requests that were traced",
            "Spans that say that the SLO was not met.",
            "ops",
            (
                Query(
                    f"sum by ({STEP}) (rate({SPANS}_calls_total"
                    f'{{{OF_SERVICE},slackline_slo_met="false"}}[$__rate_interval]))',
                    "{{service_name}} {{span_name}}",
                ),
            ),
        ),
        Panel(
            "Time to first token",
            "From the services' own metrics; a dot opens the trace of its request.",
            "s",
            quantiles("vllm:time_to_first_token_seconds", "", "tier", "{{tier}}", exemplars=True),
        ),
        jaeger_search(
            "The slowest violated requests",
            "Traces of requests that did not meet their SLO.",
            "slackline.slo_met=false",
        ),
    ),
)

# ---------------------------------------------------------------- JSON


def panel_json(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.title in ("Slack", "Error of the profile"):
        del defaults["min"]  # these go below 0
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any] = {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.kind == "stat":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False, "fields": ""},
            "textMode": "value_and_name",
            "colorMode": "none",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": PROMETHEUS,
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "datasource": PROMETHEUS,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
                "exemplar": query.exemplars,
            }
            for n, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def variable_json(name: str, selector: str) -> dict[str, Any]:
    query = f"label_values({selector}, {name})"
    return {
        "type": "query",
        "name": name,
        "label": name.partition("_")[0],
        "datasource": PROMETHEUS,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def board_json(board: Board) -> dict[str, Any]:
    panels = []
    for n, panel in enumerate(board.panels):
        made = panel if isinstance(panel, dict) else panel_json(panel)
        width = 24 if isinstance(panel, dict) else WIDTH
        row, column = divmod(n, 24 // WIDTH)
        place = {"x": column * WIDTH, "y": row * HEIGHT, "w": width, "h": HEIGHT}
        panels.append({"id": n + 1, "gridPos": place} | made)
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.text,
        "tags": ["slackline"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable_json(*item) for item in board.variables.items()]},
        "annotations": {"list": []},
        "panels": panels,
    }


BOARDS = {"slo": SLO, "planner": PLANNER, "traces": TRACES}


def texts() -> dict[str, str]:
    """The JSON of each board by the name of its file."""
    return {
        f"{name}.json": json.dumps(board_json(board), indent=1) + "\n"
        for name, board in BOARDS.items()
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (HERE / name).write_text(text)
