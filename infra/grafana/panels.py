"""Grafana's JSON of a board, its panels and their queries. Queries of rates use Grafana's
$__rate_interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}  # as provisioning/datasources has them
JAEGER = {"type": "jaeger", "uid": "jaeger"}
WIDTH, HEIGHT = 8, 8  # of a panel; a board is 24 wide


@dataclass(frozen=True)
class Query:
    """PromQL, and the legend of its lines. `exemplars`: show traces as dots."""

    expr: str
    legend: str = ""
    exemplars: bool = False


def panel(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    least: float | None = 0,
    most: float | None = None,
    newest: bool = False,
) -> dict[str, Any]:
    """`unit` is one of Grafana's; `newest`: the newest numbers, and no lines."""
    limits = {"min": least, "max": most}
    options: dict[str, Any] = {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if newest:
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False, "fields": ""},
            "textMode": "value_and_name",
            "colorMode": "none",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
        }
    return {
        "type": "stat" if newest else "timeseries",
        "title": title,
        "description": text,
        "datasource": PROMETHEUS,
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "datasource": PROMETHEUS,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": newest,
                "range": not newest,
                "exemplar": query.exemplars,
            }
            for n, query in enumerate(queries)
        ],
        "fieldConfig": {
            "defaults": {"unit": unit, **{k: v for k, v in limits.items() if v is not None}},
            "overrides": [],
        },
        "options": options,
    }


def rate(metric: str, labels: str = "") -> str:
    return f"rate({metric}{f'{{{labels}}}' if labels else ''}[$__rate_interval])"


def legend(by: str, word: str = "") -> str:
    """The values of these labels, then the word."""
    return " ".join([*(f"{{{{{label}}}}}" for label in by.split(", ")), word]).strip()


def summed(by: str, metric: str, labels: str = "", word: str = "") -> Query:
    """The sum of a counter's rate by these labels."""
    return Query(f"sum by ({by}) ({rate(metric, labels)})", legend(by, word))


def ratio(by: str, part: str, whole: str, labels: str, word: str = "") -> Query:
    """The rate of one counter over that of another."""
    each = (f"sum by ({by}) ({rate(metric, labels)})" for metric in (part, whole))
    return Query(" / ".join(each), legend(by, word))


def quantiles(
    metric: str, labels: str, by: str, *, of: Sequence[float] = (0.5, 0.99), exemplars: bool = False
) -> tuple[Query, ...]:
    """Quantiles of a histogram by this label."""
    rows = f"sum by (le, {by}) ({rate(f'{metric}_bucket', labels)})"
    return tuple(
        Query(f"histogram_quantile({q}, {rows})", f"p{q * 100:g} {legend(by)}", exemplars)
        for q in of
    )


def variable(name: str, selector: str) -> dict[str, Any]:
    """A choice among the values of this label of the selector."""
    return {
        "type": "query",
        "name": name,
        "label": name.partition("_")[0],
        "datasource": PROMETHEUS,
        "query": f"label_values({selector}, {name})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def board(name: str, text: str, chosen: tuple[str, str], *panels: dict[str, Any]) -> dict[str, Any]:
    """Three panels in a row; one of traces has a row for itself. `chosen`: a variable."""
    placed = []
    for n, one in enumerate(panels):
        width = WIDTH if one["datasource"] == PROMETHEUS else 24
        row, column = divmod(n, 24 // WIDTH)
        place = {"x": column * WIDTH, "y": row * HEIGHT, "w": width, "h": HEIGHT}
        placed.append({"id": n + 1, "gridPos": place} | one)
    return {
        "uid": f"slackline-{name.lower()}",
        "title": f"Slackline: {name}",
        "description": text,
        "tags": ["slackline"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable(*chosen)]},
        "annotations": {"list": []},
        "panels": placed,
    }


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
