"""`slackline bench` measures and shows every figure. No test depends on the values."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadgen.bench.generation import drafting
from shared.perf.engine_figures import DraftSpeed, EngineFigures

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
SCALE = {
    "replicas of a core, by that CPU, at 25 ms",
    "tokens of a core, by that CPU",
}
WAYS = ("generate", "generate_batch")
FASTER = {
    "prefill, over generate",
    "batch 1, best, over assisted generation",
    *(f"decode, batch {batch}, over {way}" for batch in (1, 8, 32) for way in WAYS),
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
    torch = FASTER if find_spec("torch") and find_spec("transformers") else set()
    assert {f["name"] for f in figures if f["least"] is not None} == torch | SIMULATED | SCALE
    for part in ("memory at rest", "memory under load"):
        assert {f["name"] for f in figures if f["part"] == part} == PROCESSES
    for service, unit in (
        ("planner", "an iteration"),
        ("admission", "a request"),
        ("gateway", "a token"),
    ):
        costs = [
            f["value"]
            for f in figures
            if f["part"] == f"scale, {service}" and f"CPU of {unit}" in f["name"]
        ]
        assert len(costs) == 2 and min(costs) > 0, "one process, and two"
    assert "steady load" in done.stderr, "progress is shown"


def test_drafts_are_shown_with_the_best_number_and_the_time_outside_the_models() -> None:
    def speed(batch: int, budget: int, tokens_per_s: float, outside_s: float) -> DraftSpeed:
        return DraftSpeed(
            batch=batch,
            budget=budget,
            tokens_per_s=tokens_per_s,
            yielded=1.0 + budget / batch / 2,
            iteration_s=0.010,
            drafted_s=0.002,
            outside_s=outside_s,
        )

    measured = EngineFigures(
        model="pair", parameters=1, device="cpu", threads=1, rounds=1, speeds=[], iteration_s={},
        outside_s={}, late_s={}, generate_alone=90.0, generate_assisted=100.0, draft=(0.4, 0.1),
        drafting=[
            speed(1, 0, 200.0, 0.0005), speed(1, 2, 240.0, 0.001),
            speed(8, 0, 800.0, 0.0003), speed(8, 8, 600.0, 0.0012),
        ],
    )  # fmt: skip
    found = {figure.name: figure for figure in drafting(measured)}
    assert found["a draft step, of the target's pass"].value == 0.4
    best = found["batch 1, best number of drafts, over none"]
    assert (best.value, best.note) == (1.2, "2 drafts")
    losing = found["batch 8, best number of drafts, over none"]
    assert (losing.value, losing.note) == (1.0, "none: drafts lose")
    outside = found["batch 8, outside the models, at most"]
    assert outside.value == pytest.approx(0.12)
    assert outside.met is False
    assert found["batch 1, outside the models, at most"].met is None
    assert found["batch 1, best, over assisted generation"].value == 2.4
