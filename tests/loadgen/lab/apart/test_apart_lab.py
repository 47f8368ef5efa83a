"""Tests of the laboratory of prefill and decode apart."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.lab.apart import figure8, ratios, runs
from loadgen.lab.apart.kept import Kept
from loadgen.lab.apart.plots import draw
from loadgen.lab.apart.ratios import Cells
from shared.vocabulary import Role

JOB = runs.Job(
    policy=runs.DISTSERVE,
    load="1500:300",
    tiers="100 ms",
    rate_rps=4.0,
    seconds=4.0,
    seed=1,
    profile="a100-llama3-8b",
    replicas=2,
    prefill=1,
    link_gbit_s=100.0,
)


def test_a_light_load_meets_its_slos_apart_and_its_row_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path / "rows.jsonl")
    row = kept.row(JOB)
    assert row.met == 1.0
    assert row.ttft_p99_s < 3.0
    monkeypatch.setattr("loadgen.lab.apart.kept.run", None)
    assert kept.row(JOB) == row


def test_requests_end_with_their_first_token_where_nothing_else_is_asked() -> None:
    first = replace(JOB, policy="fcfs", load="azure-conv", tiers="qoserve-3", prefill=0)
    assert runs.run(replace(first, link_gbit_s=0.0, first_token_only=True)).gap_p99_s == 0.0


def test_the_split_is_the_best_of_those_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        def row(self, job: runs.Job) -> runs.Row:
            met = {0: 0.5, 1: 0.3, 2: 0.6, 3: 0.8}[job.prefill] - (job.link_gbit_s == 25.0) / 10
            met += 0.3 * (job.rest is Role.BOTH)
            return runs.Row(job=job, met=met, ttft_p99_s=1.0, gap_p99_s=0.1)

    asked = ratios.cells(["a100-llama3-8b"], ["qoserve"], [1, 2], 10.0)
    cell = ratios.fill(Known(), asked[0])  # type: ignore[arg-type]
    assert cell.prefill == 3
    assert cell.together == pytest.approx(0.5)
    assert cell.apart == pytest.approx({25.0: 0.7, 100.0: 0.8, 400.0: 0.8})
    lines = ratios.lines(asked[:1], [cell])
    assert cell.by_request == pytest.approx({100.0: 0.9, 25.0: 0.8})
    assert lines[0][-7:] == ("50", "3 of 4", "70", "80", "80", "80", "90")


def test_the_plot_has_a_panel_for_each_policy(tmp_path: Path) -> None:
    asked = ratios.cells(["a100-llama3-8b"], ["qoserve", "slackline"], [1], 10.0)
    cell = Cells(0.5, 1, dict.fromkeys(ratios.LINKS, 0.7), dict.fromkeys(ratios.LINKS[:2], 0.8))
    drawn = draw(asked, [cell] * len(asked), tmp_path).read_text()
    assert "qoserve" in drawn
    assert "slackline" in drawn


def test_figure_8_asks_for_as_many_replicas_behind_each_that_computes_prompts() -> None:
    class Half:
        def row(self, job: runs.Job) -> runs.Row:
            carried = 4.0 if job.first_token_only else 2.0
            return runs.Row(
                job=job, met=float(job.rate_rps <= carried), ttft_p99_s=1.0, gap_p99_s=0.1
            )

    asked = figure8.cells(["a100-llama3-8b-qoserve"], ["fcfs"], [1], 60.0)
    found = figure8.fill(Half(), asked[0])  # type: ignore[arg-type]
    assert found.alone_rps == pytest.approx(4.0, rel=figure8.PRECISION)
    assert found.whole_rps == pytest.approx(2.0, rel=figure8.PRECISION)
