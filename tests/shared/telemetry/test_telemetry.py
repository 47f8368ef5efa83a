"""Tests of tracing: it imports nothing when off, and makes one trace across processes when on."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.telemetry.conventions import ERROR_TYPE, REPLICA
from shared.telemetry.telemetry import TraceParent, Tracing
from shared.telemetry.tracing import configure

ROOT = Path(__file__).parents[3]


def spans(path: Path) -> dict[str, dict[str, Any]]:
    return {
        span["name"]: span
        for span in (msgspec.json.decode(line) for line in path.read_bytes().splitlines())
    }


def test_off_by_default_the_sdk_is_never_imported() -> None:
    program = """
import sys
from shared.telemetry.tracing import configure
tracing = configure("planner", "p1")
span = tracing.start("completions tiny", None, {"a": 1})
span.event("offer.declined", hops=1); span.set(**{"b.c": 2}); span.end()
tracing.record("iteration", span.traceparent, 1.0, 2.0)
tracing.close()
assert span.traceparent == ""
sys.exit(any(name.partition(".")[0] == "opentelemetry" for name in sys.modules))
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT)}, check=False, timeout=60
        ).returncode
        == 0
    )


def test_off_hands_on_the_traceparent_it_was_given() -> None:
    header = TraceParent(1, 2, True).header()
    assert configure("gateway", environ={}).start("completions tiny", header).traceparent == header


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({"OTEL_TRACES_EXPORTER": "none"}, False),
        (
            {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
            False,
        ),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
    ],
)
def test_the_standard_variables_turn_it_on_and_off(env: dict[str, str], on: bool) -> None:
    tracing = configure("gateway", environ=env)
    assert (type(tracing) is Tracing) is not on
    tracing.close()


@pytest.mark.parametrize(
    "env",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER_ARG": "2"},
    ],
)
def test_a_setting_that_does_not_exist_stops_the_start(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES"):
        configure("gateway", environ=env)


def test_two_services_joined_by_traceparent_make_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "out" / "trace.jsonl"
    env = {"SLACKLINE_TRACE_FILE": str(path)}
    clock: Callable[[], float] = iter([100.0, 100.5, 101.0, 103.0]).__next__
    admission = configure("admission", "a1", env, now_unix_s=clock)
    worker = configure("worker", "r1", env, now_unix_s=clock)
    root = admission.start(
        "completions tiny", None, {"gen_ai.operation.name": "completions"}, kind="server"
    )
    root.event("offer.declined", **{REPLICA: "r2"})
    child = worker.start("prefill", root.traceparent)
    child.set(**{ERROR_TYPE: "timeout"})
    child.end(at_unix_s=102.0)
    worker.record("iteration", child.traceparent, 101.25, 101.75, {"slackline.plan.seq": 7})
    worker.record("orphan", "", 1.0, 2.0)
    root.end()
    admission.close()
    worker.close()
    seen = spans(path)
    assert set(seen) == {"completions tiny", "prefill", "iteration"}
    parent, prefill, iteration = seen["completions tiny"], seen["prefill"], seen["iteration"]
    assert len({span["trace_id"] for span in seen.values()}) == 1
    assert parent["parent_span_id"] is None
    assert prefill["parent_span_id"] == parent["span_id"]
    assert iteration["parent_span_id"] == prefill["span_id"]
    assert [(s["service"], s["instance"]) for s in (parent, prefill)] == [
        ("admission", "a1"),
        ("worker", "r1"),
    ]
    times = [(s["start_unix_s"], s["end_unix_s"]) for s in (parent, prefill, iteration)]
    assert times == [(100.0, 103.0), (101.0, 102.0), (101.25, 101.75)]
    assert parent["events"] == [
        {"name": "offer.declined", "at_unix_s": 100.5, "attributes": {REPLICA: "r2"}}
    ]
    assert prefill["attributes"][ERROR_TYPE] == "timeout"
    assert iteration["attributes"] == {"slackline.plan.seq": 7}


def test_a_ratio_of_zero_records_no_root_and_tells_its_children(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tracing = configure(
        "admission", "a1", {"SLACKLINE_TRACE_FILE": str(path), "OTEL_TRACES_SAMPLER_ARG": "0"}
    )
    root = tracing.start("completions tiny", None)
    child = tracing.start("prefill", root.traceparent)
    child.end()
    root.end()
    tracing.close()
    parent = TraceParent.parse(root.traceparent)
    assert parent is not None
    assert not parent.sampled
    assert path.read_bytes() == b""


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_traceparent_survives_its_header(trace_id: int, span_id: int, sampled: bool) -> None:
    parent = TraceParent(trace_id, span_id, sampled)
    assert TraceParent.parse(parent.header()) == parent


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{'0' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        f"ff-{'1' * 32}-{'1' * 16}-01",
        f"00-{'A' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'1' * 16}-01-more",
        f"00-{'1' * 32}-{'1' * 16}-01\n",
    ],
)
def test_a_malformed_traceparent_is_no_parent(header: str | None) -> None:
    assert TraceParent.parse(header) is None
