"""Tests of the Grafana boards: their JSON fits Grafana's schema, and each query of each panel has
data in a real Prometheus that scraped a real fleet. Grafana itself is not run.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models import dashboard

from infra.grafana.boards import BOARDS, HERE, texts
from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.telemetry import conventions as names
from tests.infra.otlp import Receiver, receiver
from tests.infra.prometheus import Prometheus, find, prometheus
from tests.infra.vllm_board import EXPRS, VARIABLE

PROVISIONED = HERE.parent / "provisioning"
WITHIN_S = 240.0  # the longest that a busy machine may take for anything
FILES = sorted(texts())


def board(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((HERE / name).read_text())
    return read


def targets(name: str, kind: str) -> list[dict[str, Any]]:
    """The queries of a board to this kind of source."""
    return [
        target
        for panel in board(name)["panels"]
        for target in panel["targets"]
        if target["datasource"]["type"] == kind
    ]


@pytest.mark.parametrize("name", FILES)
def test_the_json_is_what_the_boards_say(name: str) -> None:
    assert (HERE / name).read_text() == texts()[name], "run: python -m infra.grafana.boards"


@pytest.mark.parametrize("name", FILES)
def test_a_board_fits_grafanas_schema(name: str) -> None:
    """Read into the types of Grafana's own SDK, and written again, nothing is lost: every key is
    one that Grafana knows, where it belongs.
    """
    plugins.register_default_plugins()
    ours = board(name)
    again = json.loads(
        encoder.JSONEncoder(sort_keys=True).encode(dashboard.Dashboard.from_json(ours))
    )
    assert differences(ours, again) == []


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where something of ours is missing or another. The SDK adds defaults of its own."""
    if isinstance(ours, dict):
        assert isinstance(theirs, dict), where
        return [
            line
            for key, value in ours.items()
            for line in (
                differences(value, theirs[key], f"{where}.{key}")
                if key in theirs
                else [f"{where}.{key} is not in the schema"]
                if value not in ([], {}, None)
                else []
            )
        ]
    if isinstance(ours, list):
        if len(ours) != len(theirs):
            return [f"{where}: {len(ours)} of ours, {len(theirs)} of theirs"]
        return [
            line
            for n, pair in enumerate(zip(ours, theirs, strict=True))
            for line in differences(*pair, f"{where}[{n}]")
        ]
    return [] if ours == theirs else [f"{where}: {ours!r}, not {theirs!r}"]


def test_panels_ask_the_sources_that_are_provisioned_and_fit_side_by_side() -> None:
    sources = yaml.safe_load((PROVISIONED / "datasources" / "slackline.yaml").read_text())
    uids = {one["uid"]: one["type"] for one in sources["datasources"]}
    shown = [one["jsonData"] for one in sources["datasources"] if one["uid"] == "prometheus"]
    assert shown[0]["exemplarTraceIdDestinations"][0] == {
        "name": "trace_id",
        "datasourceUid": "jaeger",
    }
    for name in FILES:
        taken: set[tuple[int, int]] = set()
        for panel in board(name)["panels"]:
            assert uids[panel["datasource"]["uid"]] == panel["datasource"]["type"]
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken
            assert all(x < 24 for x, _ in cells)
            taken |= cells


# ---------------------------------------------------------------- with a real Prometheus


class Watched(NamedTuple):
    """A fleet under load that is scraped, and the receiver of its traces."""

    fleet: Fleet
    scraped: Prometheus
    otlp: Receiver


TIERS = ("priority", "default", "flex", "auto")


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[Watched]:
    """Two simulated replicas with more to do than they can in time."""
    find("prometheus")
    async with receiver() as otlp:
        environment = {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{otlp.address}",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "NO_PROXY": "127.0.0.1",
        }
        spec = FleetSpec(metrics=True, pace=0.5, environment=environment)
        async with Fleet(spec) as fleet:
            addresses = {
                name: url.removeprefix("http://").removesuffix("/metrics")
                for name, url in fleet.metrics.items()
            }
            gateway = addresses.pop("gateway")
            found = {
                "gateway": [gateway],
                "slackline": list(addresses.values()),
                "otel-collector": [otlp.address],
            }
            async with prometheus(folder / "prometheus", found) as scraped:
                asking = asyncio.create_task(ask_on(fleet.http_url))
                try:
                    yield Watched(fleet, scraped, otlp)
                finally:
                    asking.cancel()
                    with suppress(asyncio.CancelledError):
                        await asking


async def ask_on(url: str) -> None:
    """Ask without end, in bursts: some ask for a first token sooner than can be, some for no such
    model, and some are rounds of a task.
    """
    async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as http:

        async def ask(n: int) -> None:
            body = {
                "prompt": "x" * (600 + 100 * (n % 8)),
                "max_tokens": 24,
                "service_tier": TIERS[n % 4],
            }
            if n % 16 == 15:
                body["model"] = "no-such-model"
            headers = {"x-llm-d-slo-ttft-ms": "0.1"} if n % 16 == 7 else {}
            if n % 16 == 3:
                headers = {"x-slackline-slo-task-ttlt-ms": "60000"}
                body["user"] = f"task-{n}"
            await http.post(f"{url}/v1/completions", json=body, headers=headers)

        while True:
            await asyncio.gather(*(ask(n) for n in range(48)))


def with_values(expr: str, model: str = ".*") -> str:
    """The query with Grafana's variables in place. Rates are of half a minute, as where a scrape
    comes every 5 s.
    """
    for name, value in (
        ("$__rate_interval", "20s"),
        ("$__range", "10m"),
        ("$tier", ".*"),
        ("$replica", ".*"),
        ("$service_name", ".*"),
        ("$model_name", model),
    ):
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


async def until_each_has_data(scraped: Prometheus, exprs: list[str]) -> None:
    """Raises AssertionError with those that have none after WITHIN_S."""
    left = list(exprs)
    with suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            while left:
                left = [expr for expr in left if not await scraped.query(expr)]
                await asyncio.sleep(1.0)
    assert left == []


@pytest.mark.slow
async def test_every_query_has_data_of_a_real_fleet_and_exemplars_lead_to_its_traces(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as (fleet, scraped, otlp):
        ours = [
            with_values(target["expr"]) for name in FILES for target in targets(name, "prometheus")
        ]
        assert len(ours) > 60
        async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as http:
            models = (await http.get(f"{fleet.http_url}/v1/models")).json()["data"]
        model = models[0]["id"]
        theirs = [with_values(expr, model) for expr in EXPRS]
        await until_each_has_data(scraped, ours + theirs)

        # the choices at the top of each board, and of vLLM's
        assert model in await scraped.get(f"label/{VARIABLE}/values")
        for name in FILES:
            for variable in board(name)["templating"]["list"]:
                selector, _, label = variable["query"].removeprefix("label_values(").partition(", ")
                found = await scraped.get(f"label/{label[:-1]}/values", **{"match[]": selector})
                assert found, variable["query"]

        await check_the_page(scraped)
        await check_exemplars(scraped, otlp)
        await check_jaeger_search(otlp)
        await check_gen_ai(otlp, model)

        # an alert of the shipped rules, at work
        fleet.process("worker-r1").kill()
        async with asyncio.timeout(WITHIN_S):
            while "SlacklineReplicaLost" not in await scraped.alerts():
                await asyncio.sleep(1.0)


async def check_the_page(scraped: Prometheus) -> None:
    """docs/metrics.md has every name that was scraped, and no other."""
    page = (HERE.parents[2] / "docs" / "metrics.md").read_text()
    told = set(re.findall(r"^- `([a-z0-9_:]+)`", page, re.MULTILINE))
    jobs = '{job=~"gateway|slackline"}'
    scraped_names = {
        re.sub("_(bucket|sum|count)$", "", name)
        for name in await scraped.get("label/__name__/values", **{"match[]": jobs})
    }
    # on a busy machine a scrape may fail, and its alert be pending
    not_ours = ("up", "scrape_", "slackline:", "ALERTS")
    ours = {name for name in scraped_names if not name.startswith(not_ours)}
    only_of_a_real_engine = {names.FIT_ERROR}
    assert told - only_of_a_real_engine == ours


async def check_exemplars(scraped: Prometheus, otlp: Receiver) -> None:
    """A dot of a panel with latencies is a trace that was received."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            found = await scraped.get(
                "query_exemplars",
                query=f"{names.TIME_TO_FIRST_TOKEN}_bucket",
                start="2000-01-01T00:00:00Z",
                end="2100-01-01T00:00:00Z",
            )
            told = {one["labels"]["trace_id"] for row in found for one in row["exemplars"]}
            received = {span.trace_id for span in otlp.spans}
            if told and told <= received:
                return
            await asyncio.sleep(0.5)


async def check_jaeger_search(otlp: Receiver) -> None:
    """Jaeger is not here. The search of the board names a service and a tag: spans have both."""
    (search,) = targets("traces.json", "jaeger")
    tag, _, value = search["tags"].partition("=")
    async with asyncio.timeout(WITHIN_S):
        while not any(
            span.service == search["service"] and str(span.attributes.get(tag, "")).lower() == value
            for span in otlp.spans
        ):
            await asyncio.sleep(0.5)


async def check_gen_ai(otlp: Receiver, model: str) -> None:
    """The GenAI metrics came by OTLP, with the convention's buckets and attributes."""
    wanted = {
        names.GEN_AI_DURATION: names.GEN_AI_DURATION_BUCKETS_S,
        names.GEN_AI_TTFT: names.GEN_AI_TTFT_BUCKETS_S,
        names.GEN_AI_TPOT: names.GEN_AI_TPOT_BUCKETS_S,
    }
    async with asyncio.timeout(WITHIN_S):
        while not wanted.keys() <= otlp.metrics.keys():
            await asyncio.sleep(0.5)
    for name, bounds in wanted.items():
        points = otlp.metrics[name]
        assert all(tuple(point.explicit_bounds) == bounds for point in points)
        assert sum(point.count for point in points) > 0
        attributes = [
            {one.key: one.value.string_value for one in point.attributes} for point in points
        ]
        assert {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "slackline",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        } in attributes


def test_every_name_that_a_board_asks_for_is_one_that_we_have() -> None:
    """A query of a counter that was renamed would stay silent rather than fail."""
    ours = {value for value in vars(names).values() if isinstance(value, str)}
    for name in BOARDS:
        for target in targets(f"{name}.json", "prometheus"):
            found = re.findall(r"(?<![\w:])(?:slackline_|vllm:)\w+", target["expr"])
            for word in set(found) - {"slackline_slo_met"}:  # a label
                bare = re.sub("_(bucket|sum|count)$", "", word)
                assert {word, bare} & ours, word
