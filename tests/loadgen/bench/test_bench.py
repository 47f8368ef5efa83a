"""Tests of `slackline bench`: it prints every figure, and writes the same figures as JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SIMULATED = {"fcfs, 4 requests/s", "qoserve, 4 requests/s"}
AIMED = {
    "qoserve, 256 decodes and 64 waiting, encoded, p50",
    "qoserve, 256 decodes and 64 waiting, encoded, p99",
    "slackline, 256 decodes and 64 waiting, encoded, p50",
    "slackline, 256 decodes and 64 waiting, encoded, p99",
    "slackline, answering an offer with a TTFT, p50",
    "qoserve, answering an offer with a TTFT, p50",
    "slackline, 256 decodes and 2000 waiting, encoded, p99",
    "request to accepted, p50",
    "first delta after its iteration's end, p50",
    "engines idle for want of a plan",
    "peak memory of a run",
}
PROCESSES = {
    "nats-server",
    "admission",
    "planner",
    "relegation",
    "worker-r1",
    "worker-r2",
    "gateway",
}


@pytest.mark.slow
def test_the_quick_bench_prints_every_figure_and_writes_the_same(tmp_path: Path) -> None:
    out = tmp_path / "new" / "bench.json"
    command = [
        sys.executable,
        "-m",
        "loadgen",
        "bench",
        "--quick",
        "--json",
        "--seed",
        "3",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(out.read_text())
    assert (report["seed"], report["quick"]) == (3, True)
    assert report["machine"]["cores"] > 0
    figures = report["figures"]
    assert [f["name"] for f in figures if f["value"] is None] == []
    assert {f["name"] for f in figures if f["aim"] is not None} == AIMED
    assert {f["name"] for f in figures if f["least"] is not None} == SIMULATED
    for part in ("memory at rest", "memory under load"):
        assert {f["name"] for f in figures if f["part"] == part} == PROCESSES
    assert "steady load" in done.stderr, "progress is shown"
