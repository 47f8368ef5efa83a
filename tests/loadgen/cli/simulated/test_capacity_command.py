"""Tests of `slackline capacity`: it finds the highest rate that a policy carries, within the
precision asked for, lists every rate it tried, and agrees with `slackline simulate`.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli.main import main
from loadgen.trials.goodput import Probe, find_capacity
from shared.errors import ConfigError
from tests.loadgen.cli.command import of_line, printed, without_wall

COMMON = of_line("--workload azure-code --duration 15 --tiers demo-3 --seed 2 --policy fcfs")
LIMITS = of_line("--violations 0.05 --precision 0.1")
SEARCH = ["capacity", *COMMON, "--rate", "8", *LIMITS]


def probe_of(violated: Any, tried: list[float]) -> Any:
    def probe(rate_rps: float) -> Probe:
        tried.append(rate_rps)
        return Probe(
            rate_rps=rate_rps, offered=1000, violated_fraction=violated(rate_rps), stopped=False
        )

    return probe


@given(st.floats(0.02, 900.0), st.floats(0.02, 900.0), st.sampled_from((0.001, 0.01, 0.1)))
def test_a_sharp_limit_is_found_from_below_within_the_precision(
    limit_rps: float, first_rps: float, precision: float
) -> None:
    tried: list[float] = []
    found_rps = find_capacity(
        probe_of(lambda rate: 0.5 * (rate > limit_rps), tried), 0.01, precision, first_rps, 0.001
    )
    assert found_rps <= limit_rps <= found_rps * (1 + precision)
    assert len(tried) == len(set(tried)) < 50


@given(st.integers(0, 10_000), st.floats(0.1, 100.0))
def test_near_a_blurred_limit_the_found_rate_passes_and_the_next_step_up_fails(
    noise: int, first_rps: float
) -> None:
    def violated(rate_rps: float) -> float:
        return max(0.0, 0.002 * (rate_rps - 20) + (hash((noise, rate_rps)) % 100) / 1e4)

    tried: list[float] = []
    found_rps = find_capacity(probe_of(violated, tried), 0.01, 0.01, first_rps, 0.001)
    assert violated(found_rps) <= 0.01
    next_rps = min(rate for rate in tried if rate > found_rps)
    assert next_rps <= 1.01 * found_rps + 1e-9 and violated(next_rps) > 0.01


def test_where_even_the_lowest_rate_fails_there_is_no_capacity() -> None:
    tried: list[float] = []
    assert find_capacity(probe_of(lambda _: 1.0, tried), 0.01, 0.01, 1.0, 0.1) == 0
    assert tried == [1.0, 0.5, 0.25, 0.125]


def test_where_no_rate_fails_it_says_so() -> None:
    with pytest.raises(ConfigError, match="no limit found"):
        find_capacity(probe_of(lambda _: 0.0, []), 0.01, 0.01, 1.0, 0.1)


def test_simulate_agrees_with_both_sides_of_what_was_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, *SEARCH)
    shown = [found[key] for key in ("violations", "definition", "policy", "seed")]
    assert shown == [0.05, "deadline", "fcfs", 2]
    passed, failed = [], []
    for probe in found["probes"]:
        (passed if probe["violated_fraction"] <= 0.05 else failed).append(probe["rate_rps"])
    assert found["capacity_rps"] == max(passed) and min(failed) <= 1.1 * max(passed)
    for rate_rps in (max(passed), min(failed)):
        simulated = printed(capsys, "simulate", *COMMON, "--rate", str(rate_rps))
        [probe] = [probe for probe in found["probes"] if probe["rate_rps"] == rate_rps]
        assert simulated["offered"] == probe["offered"]
        assert (simulated["violated_fraction"] <= 0.05) == (rate_rps == max(passed))
        # A run that was stopped early has a lower bound; any other run has the fraction.
        assert probe["violated_fraction"] <= simulated["violated_fraction"]
        assert probe["stopped"] or probe["violated_fraction"] == simulated["violated_fraction"]


def test_the_same_seed_finds_the_same_and_another_definition_something_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two, other = (
        printed(capsys, *SEARCH, "--definition", name) for name in ("deadline", "deadline", "ttlt")
    )
    assert without_wall(one) == without_wall(two)
    assert other["capacity_rps"] > one["capacity_rps"]  # fewer bounds to keep
    assert any(probe["stopped"] for probe in other["probes"]), (
        "by whichever definition, a run ends once it is known to fail"
    )


def test_recorded_arrivals_are_thinned_and_compressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (f"{0.4 * n},{500 + 37 * n % 4000},{3 + n % 20}\n" for n in range(200))
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(rows))
    recorded = ["--trace", str(tmp_path / "t.csv"), *COMMON[2:], "--arrivals", "trace"]
    recorded += ["--duration", "20"]
    found = printed(capsys, "capacity", *recorded, *LIMITS)
    offered = {probe["rate_rps"]: probe["offered"] for probe in found["probes"]}
    # 50 requests were recorded in 20 s
    assert offered[1.0] < 45 < 50 < offered[found["capacity_rps"]]
    simulated = printed(capsys, "simulate", *recorded, "--rate", str(found["capacity_rps"]))
    assert simulated["violated_fraction"] <= 0.05


def test_people_see_every_rate_that_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SEARCH) == 0
    shown = capsys.readouterr()
    assert shown.err.count("requests violated") == shown.out.count("kept") + shown.out.count(
        "too many"
    )
    assert "too many" in shown.out and "seed 2" in shown.out
