"""Tests of `slackline search`: it tries every combination of a policy's settings, ranks the best
first, and agrees with `slackline simulate` and `slackline capacity`.
"""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli.main import main
from loadgen.trials.grid import combinations, own_grid, parse_grid
from shared.errors import ConfigError
from shared.policy import registry
from shared.policy.ascendra.policy import HP, LP, pools
from tests.loadgen.cli.command import of_line, printed, without_wall

LOAD = of_line("--workload azure-code --duration 15 --seed 2 --tiers demo-3")
TWO = of_line("--policy fcfs --set router=round_robin --replicas 2")
CHUNKS = [*TWO, "--grid", "chunk_tokens=256,1024", "--jobs", "1"]


def of_configuration(one: dict[str, Any]) -> list[str]:
    """The configuration as options of `simulate` and `capacity`."""
    return [*TWO, "--set", f"chunk_tokens={one['settings']['chunk_tokens']}"]


def test_at_a_rate_the_fewest_violations_stand_first_and_simulate_finds_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, "search", *LOAD, *CHUNKS, "--rate", "9")
    assert (found["rate_rps"], found["violations"]) == (9.0, None)
    assert (found["settings"], found["grid"]) == (
        {"router": "round_robin"},
        {"chunk_tokens": ["256", "1024"]},
    )
    fractions = [one["figures"]["violated_fraction"] for one in found["configurations"]]
    assert fractions == sorted(fractions) and fractions[0] < fractions[-1]
    for one in found["configurations"]:
        simulated = printed(capsys, "simulate", *LOAD, *of_configuration(one), "--rate", "9")
        assert simulated["violated"] == one["figures"]["violated"]
        assert simulated["settings"] == one["figures"]["settings"]


@pytest.mark.slow
def test_without_a_rate_the_most_capacity_stands_first_and_capacity_finds_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limits = of_line("--violations 0.1 --precision 0.1")
    found = printed(capsys, "search", *LOAD, *CHUNKS, *limits)
    assert (found["rate_rps"], found["violations"]) == (None, 0.1)
    carried = [one["capacity_rps"] for one in found["configurations"]]
    assert carried == sorted(carried, reverse=True)
    best = found["configurations"][0]
    alone = printed(capsys, "capacity", *LOAD, *of_configuration(best), *limits)
    assert alone["capacity_rps"] == best["capacity_rps"]
    assert alone["probes"] == best["probes"]


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = (
        printed(capsys, "search", *LOAD, *CHUNKS, "--jobs", jobs, "--rate", "6")
        for jobs in ("1", "2")
    )
    assert without_wall(one) == without_wall(two)


def test_people_see_each_configuration_as_it_ends_and_then_all_in_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["search", *LOAD, *CHUNKS, "--rate", "9"]) == 0
    shown = capsys.readouterr()
    begun, first, last = shown.err.splitlines()
    assert begun.startswith("2 configurations, ")
    assert re.match(r"\[1/2, about \d+ s left\] fcfs:chunk_tokens=256: ", first)
    assert last.startswith("[2/2] fcfs:chunk_tokens=1024: ")
    assert (
        "fcfs:router=round_robin on azure-code, 9 requests/s; 2 x a100-llama3-8b" in shown.out
        and "seed 2" in shown.out
    )
    table = [line.split() for line in shown.out.splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert len(table) == 2 and {row[1] for row in table} == {"256", "1024"}


def test_ascendra_without_a_grid_searches_what_its_paper_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = of_line("--set batch_requests=128 --set worst_batches=1")
    words = of_line("--policy ascendra --replicas 3 --definition mean-tpot --rate 12 --jobs 1")
    found = printed(capsys, "search", *LOAD[:-1], "ascendra-8b-sharegpt", *words, *fixed)
    assert found["grid"] == {"subgroup": ["2L1H", "1L2H"]}, "what is fixed is not searched"
    by_mix = {
        one["settings"]["subgroup"]: one["figures"]["violated_fraction"]
        for one in found["configurations"]
    }
    assert by_mix["2L1H"] != by_mix["1L2H"]


@given(st.integers(1, 20))
def test_the_mixes_searched_for_any_number_of_replicas_are_settings_of_the_policy_and_all_different(
    replicas: int,
) -> None:
    tried = combinations(own_grid("ascendra", replicas, {}))
    mixes = {}
    for configuration in tried:
        mix = registry.make("ascendra", configuration).declared.pools
        if "subgroup" in configuration:
            mixes[configuration["subgroup"]] = mix
            assert set(mix) == {LP, HP}
    assert len({tuple(mix) for mix in mixes.values()}) == len(mixes)
    assert bool(mixes) == (replicas > 1)


@given(st.integers(1, 30), st.integers(1, 30))
def test_pools_of_a_subgroup_are_as_many_as_it_says_and_spread_evenly(low: int, high: int) -> None:
    found = pools(f"{low}L{high}H")
    assert (found.count(LP), found.count(HP)) == (low, high)
    for n in range(1, len(found)):
        assert abs(found[:n].count(HP) - n * high / (low + high)) <= 1


def test_every_combination_is_there_once_with_the_last_key_changing_fastest() -> None:
    grid = parse_grid(["a=1,2", "b=x,y,z"], {"c": "0"})
    found = ["".join(one.values()) for one in combinations(grid)]
    assert found == ["1x", "1y", "1z", "2x", "2y", "2z"]


@pytest.mark.parametrize("word", ["a", "=1,2", "a=", "a=1,,2", "a=1,1", "b=1,2"])
def test_a_grid_that_says_nothing_clear_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--grid"):
        parse_grid(["b=3", word], {})
