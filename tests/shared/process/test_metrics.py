"""Tests of metrics: a scraper reads what was counted, and every service can be asked."""

import asyncio
import contextlib
import math
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from loadgen.fleet.ports import free_port
from shared.errors import ConfigError
from shared.process.configuration import Watched, load_watched
from shared.process.scrape import SCRAPE_LIMIT_BYTES, scraped
from shared.telemetry import conventions as names
from shared.telemetry.about import about
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry

WITHIN_S = 60.0  # the longest that a busy machine may take for anything


def samples(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(exposition([registry], "")[1])
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


def test_counters_and_gauges_reach_the_scraper_with_their_labels() -> None:
    registry = Registry()
    requests = registry.counter(
        "slackline_requests_total", "requests by verdict", ("tier", "verdict")
    )
    requests.labels("chat", "met").add()
    requests.labels("chat", "met").add(2)
    requests.labels('a"b\\c\nd', "missed").add()
    registry.gauge("vllm:num_requests_running", "running").labels().set(2.5)
    assert samples(registry) == {
        ("slackline_requests_total", (("tier", "chat"), ("verdict", "met"))): 3,
        ("slackline_requests_total", (("tier", 'a"b\\c\nd'), ("verdict", "missed"))): 1,
        ("vllm:num_requests_running", ()): 2.5,
    }


@given(st.lists(st.floats(-10, 10, allow_nan=False)))
def test_a_bucket_holds_what_is_at_or_below_its_bound(values: list[float]) -> None:
    registry = Registry()
    seen = registry.histogram("slackline_slack_seconds", "slack", (-1.0, 0.0, 2.5)).labels()
    for value in values:
        seen.observe(value)
    read = samples(registry)
    for bound, text in ((-1.0, "-1"), (0.0, "0"), (2.5, "2.5"), (math.inf, "+Inf")):
        assert read["slackline_slack_seconds_bucket", (("le", text),)] == sum(
            v <= bound for v in values
        )
    assert read["slackline_slack_seconds_count", ()] == len(values) == seen.count
    assert read["slackline_slack_seconds_sum", ()] == pytest.approx(sum(values), abs=1e-9)


def test_labels_that_clients_choose_are_capped_and_the_rest_goes_to_other() -> None:
    registry = Registry()
    family = registry.counter(
        "slackline_tenant_requests_total", "by tenant", ("tenant",), caps={"tenant": 2}
    )
    for tenant in ("a", "b", "c", "d", "a"):
        family.labels(tenant).add()
    assert {labels[0][1]: n for (_, labels), n in samples(registry).items()} == {
        "a": 2,
        "b": 1,
        "other": 2,
    }


def test_a_name_is_registered_once_and_labels_are_complete() -> None:
    registry = Registry()
    family = registry.counter("slackline_offers_total", "offers", ("answer",))
    with pytest.raises(ValueError, match="twice"):
        registry.gauge("slackline_offers_total", "again")
    with pytest.raises(ValueError, match="answer"):
        family.labels()


def test_exemplars_are_told_to_a_scraper_that_asks_for_open_metrics() -> None:
    registry = Registry()
    latency = registry.histogram("slackline_wait_seconds", "wait", (0.5, 2.0), ("tier",))
    latency.labels("chat").observe(1.5, 1, "a" * 32)
    latency.labels("chat").observe(0.1)
    registry.counter("slackline_ended_total", "ended").labels().add(2)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    kind, text = exposition([registry, about("test")], accept)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in open_metrics(text)}  # a strict parser
    assert families["slackline_ended"].type == "counter"
    found = [s.exemplar for s in families["slackline_wait_seconds"].samples if s.exemplar]
    assert [(one.labels, one.value) for one in found] == [({"trace_id": "a" * 32}, 1.5)]
    kind, text = exposition([registry], "text/plain")
    assert kind.startswith("text/plain; version=0.0.4")
    assert "trace_id" not in text


def test_a_process_tells_its_build_and_what_it_takes_of_the_machine() -> None:
    read = {name: n for (name, _), n in samples(about("planner")).items()}
    assert read[names.BUILD_INFO] == 1
    assert 0 < read[names.PROCESS_CPU] < time.process_time() + 1
    assert 2**20 < read[names.PROCESS_RESIDENT] < read[names.PROCESS_VIRTUAL]
    assert 0 < read[names.PROCESS_OPEN_FILES] < read[names.PROCESS_MOST_FILES]
    assert time.time() - 86400 < read[names.PROCESS_START] <= time.time() + 1


# ---------------------------------------------------------------- asked over HTTP


def watched() -> Watched:
    return Watched(metrics_port=free_port())


async def test_metrics_of_all_registries_and_health_are_told_over_http() -> None:
    first, second = Registry(), Registry()
    registries = [first]
    async with (
        scraped(watched(), registries) as address,
        httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as http,
    ):
        registries.append(second)
        first.counter("slackline_a_total", "a").labels().add(2)
        second.gauge("slackline_b", "b").labels().set(0.5)
        answer = await http.get(address)
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(answer.text)
        assert {s.name: s.value for family in families for s in family.samples} == {
            "slackline_a_total": 2,
            "slackline_b": 0.5,
        }
        health = address.replace("/metrics", "/health?verbose=1")
        assert (await http.get(health)).json() == {"status": "ok"}
        assert (await http.get(address + "/more")).status_code == 404
        assert (await http.post(address, content=b"x")).status_code == 405


async def test_who_says_nothing_or_nonsense_holds_up_nobody() -> None:
    async with (
        scraped(watched(), [Registry()]) as address,
        httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as http,
    ):
        host, port = httpx.URL(address).host, httpx.URL(address).port
        _, silent = await asyncio.open_connection(host, port)
        for nonsense in (b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET", b"x" * (2 * SCRAPE_LIMIT_BYTES)):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(nonsense)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):  # hung up on before it had said all
                await asyncio.wait_for(reader.read(), WITHIN_S)
            writer.close()
        assert (await http.get(address)).status_code == 200
        silent.close()


async def test_no_port_means_no_listener_and_a_taken_one_is_an_error() -> None:
    async with scraped(Watched(), []) as address:
        assert address == ""
    taken = watched()
    async with scraped(taken, []):
        with pytest.raises(ConfigError, match=str(taken.metrics_port)):
            async with scraped(taken, []):
                pass


def test_the_port_is_set_for_all_services_or_for_one_and_must_be_one() -> None:
    assert load_watched("worker", {}) == Watched(metrics_port=0)
    both = {
        "SLACKLINE_METRICS_PORT": "9464",
        "SLACKLINE_WORKER_METRICS_PORT": "9465",
        "SLACKLINE_WORKER_REPLICA": "r1",
    }
    assert load_watched("worker", both).metrics_port == 9465
    assert load_watched("planner", both).metrics_port == 9464
    with pytest.raises(ConfigError, match="SLACKLINE_METRICS_PORT"):
        load_watched("planner", {"SLACKLINE_METRICS_PORT": "65536"})
