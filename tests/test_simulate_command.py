"""`slackline simulate`: its JSON has the names other programs read, is the same for the same seed, and mistakes are one line."""

import json

import pytest

from loadgen.cli import main

COMMON = ["simulate", "--workload", "mix", "--rate", "4", "--duration", "8", "--tiers", "demo-3", "--seed", "5"]
WALL = ("wall_s", "requests_per_wall_s")


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    assert main([*COMMON, "--json", *more]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_json_has_the_promised_keys_and_the_same_seed_gives_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (printed(capsys, "--policy", "edf", "--set", "chunk_tokens=512", "--latency", "live") for _ in range(2))
    promised = (
        "policy profile replicas rate_rps seed definition offered finished violated violated_fraction by_tier by_importance by_length "
        "relegated preempted goodput_rps iterations simulated_s wall_s requests_per_wall_s"
    )
    assert set(promised.split()) <= set(one)
    tier = one["by_tier"]["interactive"]  # type: ignore[index]
    assert set(tier) == {"offered", "violated_fraction", "ttft_s", "tbt_s", "ttlt_s"}
    assert set(tier["ttft_s"]) == {"p50", "p99"}
    assert set(one["by_length"]) == {"short", "long"}  # type: ignore[call-overload]
    assert {k: v for k, v in one.items() if k not in WALL} == {k: v for k, v in two.items() if k not in WALL}
    assert one["offered"] == one["finished"]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, "--policy", "fcfs", "--replicas", "2", "--check", "50"]) == 0
    out = capsys.readouterr().out
    assert "interactive" in out and "TTFT 2.0 s" in out and "iterations" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "lifo"], "no policy is called"),
        (["--profile", "b900"], "no profile named"),
        (["--set", "chunk"], "expected KEY=VALUE"),
        (["--set", "chunks=4"], "no setting"),
        (["--replicas", "0"], "--replicas must be 1 or more"),
        (["--arrivals", "trace"], "needs --trace"),
        (["--tiers", "nobody"], "neither a built-in set"),
        (["--wait", "-1"], "--wait must be 0 or more"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
