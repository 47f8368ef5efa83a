"""Tests of the page with the metrics of all processes of a fleet, by Prometheus's own parser."""

import asyncio
import os
import sys

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from loadgen.fleet.metrics_page import listen, merged, metrics_page
from shared.process.configuration import Watched
from shared.process.scrape import scraped
from shared.telemetry.exposition import OPEN_METRICS
from shared.telemetry.instruments import Registry

ADMISSION = """# HELP slackline_requests_total Requests.
# TYPE slackline_requests_total counter
slackline_requests_total{tier="chat {a}"} 3
slackline_requests_total{} 1
# HELP slackline_up One.
# TYPE slackline_up gauge
slackline_up 1
"""
PLANNER = """# HELP slackline_up One.
# TYPE slackline_up gauge
slackline_up 2
# HELP slackline_step_seconds Steps.
# TYPE slackline_step_seconds histogram
slackline_step_seconds_bucket{le="0.1"} 4
slackline_step_seconds_bucket{le="+Inf"} 5
slackline_step_seconds_sum 0.5
slackline_step_seconds_count 5
"""


def test_each_family_is_there_once_and_each_sample_says_its_process() -> None:
    text = merged({"admission": ADMISSION, "planner": PLANNER, "relegation": ""})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert sorted(families) == ["slackline_requests", "slackline_step_seconds", "slackline_up"]
    up = {s.labels["process"]: s.value for s in families["slackline_up"].samples}
    assert up == {"admission": 1.0, "planner": 2.0}
    assert [s.labels for s in families["slackline_requests"].samples] == [
        {"process": "admission", "tier": "chat {a}"},
        {"process": "admission"},
    ]
    assert {s.labels["process"] for s in families["slackline_step_seconds"].samples} == {"planner"}
    assert families["slackline_step_seconds"].type == "histogram"


def test_the_page_has_exemplars_for_a_scraper_that_asks_for_open_metrics() -> None:
    async def main() -> tuple[str, str]:
        made = Registry()
        made.counter("slackline_ended_total", "ended").labels().add(2)
        made.histogram("slackline_wait_seconds", "wait", (1.0,)).labels().observe(0.5, 1, "ab" * 16)
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        async with (
            scraped(Watched(metrics_port=port), [made]) as address,
            metrics_page(listen("127.0.0.1", 0), {"a": address, "b": address}) as page,
            httpx.AsyncClient(trust_env=False) as http,
        ):
            answer = await http.get(page, headers={"accept": OPEN_METRICS})
            return answer.headers["content-type"], answer.text

    kind, text = asyncio.run(main())
    assert kind == OPEN_METRICS
    families = {family.name: family for family in open_metrics(text)}  # a strict parser
    assert [s.labels["process"] for s in families["slackline_ended"].samples] == ["a", "b"]
    told = [s for s in families["slackline_wait_seconds"].samples if s.exemplar]
    assert [(s.labels["process"], s.exemplar.labels["trace_id"]) for s in told] == [
        ("a", "ab" * 16),
        ("b", "ab" * 16),
    ]


def test_a_process_that_does_not_answer_leaves_the_others_on_the_page() -> None:
    async def main() -> str:
        listener = listen("127.0.0.1", 0)
        async with (
            metrics_page(listener, {"gone": "http://127.0.0.1:1/metrics"}) as address,
            httpx.AsyncClient(trust_env=False) as http,
        ):
            answer = await http.get(address)
            assert answer.status_code == 200
            return answer.text

    assert asyncio.run(main()) == ""


def test_up_has_the_metrics_of_every_process_at_the_port_of_the_environment() -> None:
    async def main() -> set[str]:
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        up = (sys.executable, "-m", "loadgen", "up", "--engine", "sim", "--port", "0")
        process = await asyncio.create_subprocess_exec(
            *up, "--http-port", "0", stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"SLACKLINE_METRICS_PORT": str(port)},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(120):
                while not (line := await process.stdout.readline()).startswith(b"stop"):
                    assert line, "it did not start"
            async with httpx.AsyncClient(trust_env=False) as http:
                text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        finally:
            process.terminate()
            await process.wait()
        return {
            sample.labels["process"]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    processes = {"admission", "planner", "relegation", "worker-r1", "worker-r2", "gateway"}
    assert asyncio.run(main()) == processes
