"""Metrics: what a scraper reads is what was counted."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import Registry


def samples(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(registry.render_prometheus())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_counters_and_gauges_reach_the_scraper_with_their_labels() -> None:
    registry = Registry()
    requests = registry.counter("slackline_requests_total", "requests by verdict", ("tier", "verdict"))
    requests.labels("chat", "met").add()
    requests.labels("chat", "met").add(2)
    requests.labels('a"b\\c\nd', "missed").add()
    registry.gauge("vllm:num_requests_running", "running").labels().set(2.5)
    assert samples(registry) == {
        ("slackline_requests_total", (("tier", "chat"), ("verdict", "met"))): 3,
        ("slackline_requests_total", (("tier", 'a"b\\c\nd'), ("verdict", "missed"))): 1,
        ("vllm:num_requests_running", ()): 2.5,
    }


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10, allow_nan=False)))
def test_a_bucket_holds_what_is_at_or_below_its_bound(values: list[float]) -> None:
    registry = Registry()
    seen = registry.histogram("slackline_slack_seconds", "slack", (-1.0, 0.0, 2.5)).labels()
    for value in values:
        seen.observe(value)
    read = samples(registry)
    for bound, text in ((-1.0, "-1"), (0.0, "0"), (2.5, "2.5"), (math.inf, "+Inf")):
        assert read["slackline_slack_seconds_bucket", (("le", text),)] == sum(v <= bound for v in values)
    assert read["slackline_slack_seconds_count", ()] == len(values) == seen.count
    assert read["slackline_slack_seconds_sum", ()] == pytest.approx(sum(values), abs=1e-9)


def test_labels_that_clients_choose_are_capped_and_the_rest_goes_to_other() -> None:
    registry = Registry()
    family = registry.counter("slackline_tenant_requests_total", "by tenant", ("tenant",), caps={"tenant": 2})
    for tenant in ("a", "b", "c", "d", "a"):
        family.labels(tenant).add()
    assert {labels[0][1]: n for (_, labels), n in samples(registry).items()} == {"a": 2, "b": 1, "other": 2}


def test_a_name_is_registered_once_and_labels_are_complete() -> None:
    registry = Registry()
    family = registry.counter("slackline_offers_total", "offers", ("answer",))
    with pytest.raises(ValueError, match="twice"):
        registry.gauge("slackline_offers_total", "again")
    with pytest.raises(ValueError, match="answer"):
        family.labels()
