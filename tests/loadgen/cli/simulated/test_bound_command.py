"""Tests of `slackline bound`: it takes the options of `slackline simulate`; its JSON repeats."""

import pytest

from loadgen.cli.main import main
from tests.loadgen.cli.command import printed, without_wall

QOSERVE = "a100-llama3-8b-qoserve"
LOAD = f"--workload azure-code --rate 9 --duration 40 --tiers demo-3 --seed 2 --profile {QOSERVE}"
COMMAND = ["bound", *LOAD.split()]


def test_the_json_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (printed(capsys, *COMMAND) for _ in range(2))
    assert without_wall(one) == without_wall(two)
    assert {"met_fraction", "violated_fraction", "by", "met_by", "wall_s"} <= set(one)
    assert 0 < one["met_fraction"] < 1


def test_it_takes_the_options_of_simulate_and_prints_the_same_notes_on_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (
        "--workload sharegpt --rate 2 --duration 15 --tiers sola-5x --seed 1 --replicas 2 "
        "--definition max-tpot-10 --policy fcfs --set chunk_tokens=512 --latency live --wait 60 "
        "--check 100"
    )
    simulated, bounded = (printed(capsys, c, *options.split()) for c in ("simulate", "bound"))
    keys = "profile replicas workload tiers rate_rps duration_s seed definition offered"
    assert all(bounded[key] == simulated[key] for key in keys.split())
    assert bounded["rate_rps"] == 2.0
    assert bounded["violated_fraction"] <= simulated["violated_fraction"]


def test_it_prints_a_table_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--definition", "ttlt", "--replicas", "2"]) == 0
    printed = capsys.readouterr().out
    assert "pace" in printed
    assert "Every scheduler without speculation violates at least" in printed
