"""Tests of simulated runs that keep accounts: the seconds of each request add up, and nothing else
about the run changes.
"""

import csv
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.cli.main import main
from loadgen.simulator.deployment import Deployment, Outage
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.rules.tiers import DEFAULT
from shared.vocabulary import Missed
from tests.loadgen.cli.command import of_line, printed
from tests.loadgen.planned import drawn

DEPLOYMENTS = [
    Deployment("fcfs", "a100-llama3-8b"),
    Deployment("slackline", "a100-llama3-8b", 2, draft=0.02),
    Deployment("qoserve", "a100-llama3-8b", 2, outages=(Outage(0, 3.0, 4.0),)),
]


def run(deployment: Deployment, *, accounts: bool) -> SimulationResult:
    requests = drawn("mix", 9.0, 12.0, seed=3)
    return simulate(Traffic(requests, DEFAULT, 3), deployment, RunOptions(accounts=accounts))


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each.policy)
def test_the_seconds_of_each_request_add_up_and_the_run_is_the_same(deployment: Deployment) -> None:
    kept, plain = run(deployment, accounts=True), run(deployment, accounts=False)
    late = 0
    for record, verdict, other in zip(kept.records, kept.verdicts, plain.verdicts, strict=True):
        assert record is not None and verdict is not None and other is not None
        assert replace(verdict, first_missed=None) == other
        account = record.resume.diary.account
        assert account.total_s == pytest.approx(verdict.ended_unix_s - record.arrived_unix_s)
        if verdict.missed in (Missed.TTFT, Missed.TBT):
            late += 1
            assert verdict.first_missed is not None and verdict.first_missed.cause
    assert late


LOAD = of_line("--workload mix --rate 8 --duration 6 --policy fcfs --seed 4")


def test_a_line_for_each_request_and_the_reason_of_a_late_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "requests.csv"
    figures = printed(capsys, "simulate", *LOAD, "--requests", str(file))
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["number"]) for row in rows] == list(range(figures["offered"]))
    late = [row for row in rows if row["slo_met"] == "0"]
    assert len(late) == figures["violated"] > 0
    one = next(row for row in late if row["missed"] == "ttft")
    assert float(one["arrived_s"]) < float(one["due_s"]) < float(one["first_s"])
    assert float(one["first_s"]) <= float(one["last_s"])
    explained = printed(capsys, "simulate", *LOAD, "--explain", one["number"])
    assert explained["tier"] == one["tier"]
    assert explained["first_missed"]["bound"] == "ttft"
    assert explained["first_missed"]["cause"] == one["cause"]
    assert main(["simulate", *LOAD, "--explain", one["number"]]) == 0
    assert "where its time went" in capsys.readouterr().out


def test_a_request_that_is_not_there_cannot_be_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", *LOAD, "--explain", "100000"]) == 2
    assert "--explain: the requests are 0 to " in capsys.readouterr().err
