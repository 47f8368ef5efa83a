"""Tests of `slackline advise`: it finds the fewest replicas for a load, or says that none do."""

import csv
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.advise.advice import choose
from loadgen.advise.late_minutes import by_minute
from loadgen.advise.replica_search import (
    MOST_REPLICAS,
    WHOLE,
    Fleet,
    Probe,
    Search,
    next_count,
    next_share,
)
from loadgen.advise.window import Window, busiest, thinned
from loadgen.cli.main import main
from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment
from loadgen.trials.trial import Trial
from shared.perf import profile_file as profiles
from shared.rules.tiers import DEFAULT
from tests.loadgen.cli.command import of_line, printed, refused, without_wall

PROFILE = "a100-llama3-8b"
TIERS = {
    "name": "two",
    "default": "quick",
    "tiers": {
        "quick": {"slo": {"ttft_s": 1.0, "tbt_s": 0.06}, "share": 0.5},
        "whole": {"slo": {"ttlt_s": 30.0}, "share": 0.5},
    },
}


def trace(path: Path, rate_rps: float, *, times: bool = True, seconds: float = 40.0) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens", "app"))
        for n in range(int(rate_rps * seconds)):
            at_s = n / rate_rps if times else ""
            rows.writerow((at_s, 1200 + 37 * n % 900, 40 + 13 * n % 90, "app"))
    return path


def test_the_replicas_of_one_of_several_models_are_counted_by_its_part_of_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The advice for one model of a mixed trace is that for a trace with only its requests."""
    alone, mixed = trace(tmp_path / "alone.csv", 2.0), tmp_path / "mixed.csv"
    with alone.open() as file:
        head, *rows = csv.reader(file)
    with mixed.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*head, "model"])
        for row in rows:
            out.writerow([*row, "small"])
            out.writerow([row[0], 8000, 100, "app", "large"])
    usual = ("--tiers", str(tiers(tmp_path / "tiers.json")), "--profile", PROFILE, "--jobs", "1")
    words = ("advise", *usual, "--draft", "0", "--trace")
    want = json.dumps(without_wall(printed(capsys, *words, str(alone))))
    got = json.dumps(without_wall(printed(capsys, *words, str(mixed), "--of-model", "small")))
    assert got.replace("mixed, small", "alone") == want
    assert "it has large, small" in refused(capsys, *words, str(mixed), "--of-model", "x")


def tiers(path: Path, **quick: float) -> Path:
    changed = json.loads(json.dumps(TIERS))
    changed["tiers"]["quick"]["slo"] |= quick
    path.write_text(json.dumps(changed))
    return path


def asked(load: Path, slos: Path, *words: str) -> list[str]:
    return ["advise", "--trace", str(load), "--tiers", str(slos), "--jobs", "1", *words]


def advised(
    capsys: pytest.CaptureFixture[str], folder: Path, rate_rps: float, *words: str, **quick: float
) -> Any:
    load = trace(folder / "load.csv", rate_rps)
    slos = tiers(folder / "tiers.json", **quick)
    return printed(capsys, *asked(load, slos, "--profile", PROFILE, *words))


@pytest.mark.slow
def test_more_load_needs_more_replicas_and_one_fewer_is_not_enough(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    light = advised(capsys, tmp_path, 3.0, "--draft", "0")
    heavy = advised(capsys, tmp_path, 20.0, "--draft", "0")
    assert light["chosen"]["replicas"] == 1
    assert light["shown"]["figures"]["violated_fraction"] <= 0.01
    needed = heavy["chosen"]["replicas"]
    assert needed > 1
    met = {count["replicas"]: count["attainment"] for count in heavy["chosen"]["counts"]}
    assert met[needed] >= 0.99 > met[needed - 1]
    assert heavy["shown"]["one_fewer"]["replicas"] == needed - 1
    assert sum(heavy["shown"]["minutes"]["offered"]) == heavy["requests"] == 800


@pytest.mark.slow
def test_where_each_kind_needs_one_gpu_the_cheaper_one_is_enough(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load = trace(tmp_path / "load.csv", 1.0, seconds=1.0)
    slos = tiers(tmp_path / "tiers.json")
    assert main(asked(load, slos, "--draft", "0")) == 0
    told = capsys.readouterr().out
    assert "a100-llama3-8b and h100-llama3-8b need 1 GPU each: the cheaper one is enough." in told
    assert "times one of" not in told
    assert "load: 1 request in" in told
    assert "1 requests" not in told


@pytest.mark.slow
def test_requests_that_may_wait_are_done_some_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load = trace(tmp_path / "load.csv", 40.0, seconds=20.0)
    slos = tmp_path / "tiers.json"
    patient = {"batch": {"slo": {"ttlt_s": 86400.0}}}
    slos.write_text(json.dumps({"name": "patient", "default": "batch", "tiers": patient}))
    found = printed(capsys, *asked(load, slos, "--profile", PROFILE, "--draft", "0"))
    [fleet] = found["fleets"]
    # one replica meets every SLO of these seconds, and would fall behind for ever
    assert {count["replicas"]: count["attainment"] for count in fleet["counts"]}[1] == 1.0
    assert fleet["replicas"] > 1


def test_requests_that_no_fleet_serves_in_time_are_told_and_not_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = advised(capsys, tmp_path, 3.0, "--draft", "0", ttft_s=0.01)
    [quick] = found["hopeless"]
    assert quick["tier"] == "quick" and quick["hopeless"] == quick["offered"] > 0
    assert found["chosen"]["replicas"] == 1
    assert found["shown"]["figures"]["by_tier"]["whole"]["violated"] == 0


@pytest.mark.slow
def test_a_draft_model_keeps_a_pace_that_no_fleet_keeps_without_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--draft", "0.02", "--definition", "mean-tpot")
    found = advised(capsys, tmp_path, 1.0, *words, tbt_s=0.008)
    without, with_draft = found["fleets"]
    assert not without["draft"] and with_draft["draft"]
    without_it, with_it = (
        {count["replicas"]: count["attainment"] for count in fleet["counts"]}
        for fleet in (without, with_draft)
    )
    assert with_it[1] > without_it[1] + 0.2


@pytest.mark.slow
def test_the_answer_is_printed_with_the_plots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load, slos = trace(tmp_path / "load.csv", 3.0), tiers(tmp_path / "tiers.json")
    plots = tmp_path / "plots"
    assert main(asked(load, slos, "--profile", PROFILE, "--plots", str(plots))) == 0
    printed = capsys.readouterr().out
    assert "120 requests on 1 replica" in " ".join(printed.replace(" in 40 s,", "").split())
    assert "saves no replica" in printed
    assert sorted(path.name for path in plots.iterdir()) == [
        "attainment-over-gpus.svg",
        "violations-over-time.svg",
    ]


def test_a_trace_without_times_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load = trace(tmp_path / "load.csv", 3.0, times=False)
    assert main(["advise", "--trace", str(load)]) == 2
    assert "slackline capacity" in capsys.readouterr().err


def search(fewest: int, first: int) -> list[int]:
    known: dict[int, bool] = {}
    while (count := next_count(known, first)) is not None:
        assert count not in known
        known[count] = count >= fewest
    return sorted(known)


@given(st.integers(1, MOST_REPLICAS), st.integers(1, MOST_REPLICAS))
def test_the_fewest_replicas_and_one_fewer_are_tried(fewest: int, first: int) -> None:
    tried = search(fewest, first)
    assert fewest in tried and (fewest == 1 or fewest - 1 in tried)
    assert len(tried) < 30


def test_the_search_ends_where_no_number_is_enough() -> None:
    assert max(search(MOST_REPLICAS + 1, 3)) == MOST_REPLICAS


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_the_share_that_replicas_carry_is_found_to_a_step(carried: float, first: float) -> None:
    known: dict[float, bool] = {}
    while (share := next_share(known, first)) is not None:
        assert 0 < share <= 1.0 and len(known) < 100
        known[share] = share <= carried
    best = max((share for share, passed in known.items() if passed), default=0.0)
    assert best <= carried
    assert best == 1.0 if carried == 1.0 else best * 1.1 > carried * 0.999


def planned(arrivals_s: list[float], prompt_tokens: list[int]) -> list[PlannedRequest]:
    return [
        PlannedRequest(n, at_s, tokens, 10, "quick", 1.0, "default", "app")
        for n, (at_s, tokens) in enumerate(zip(arrivals_s, prompt_tokens, strict=True))
    ]


def test_the_busiest_stretch_has_the_most_work() -> None:
    times = [float(n) for n in range(100)]
    requests = planned(times, [4000 if 50 <= n < 60 else 100 for n in range(100)])
    found = busiest(requests, 100.0, profiles.load(PROFILE), 10.0)
    assert (found.from_s, found.seconds, len(found.requests)) == (50.0, 10.0, 10)
    assert found.requests[0].arrival_s == 0.0 and found.requests[0].number == 0
    half = thinned(found, 0.5)
    assert len(half.requests) == 5 and half.seconds == found.seconds
    minutes = by_minute(found, [None] * 10)
    assert minutes.offered == minutes.violated == [10]


def searched(fewest: float, requests: int, near: int | None, seed: int) -> tuple[Fleet, int, int]:
    """The fleet that a search finds where `fewest` replicas are enough for the whole load, the
    steps, and the runs, which end in any order.
    """
    stretch = Window(planned([0.1] * requests, [4000] * requests), 0.0, 120.0)
    trial = Trial(
        deployment=Deployment("slackline", PROFILE), tiers=DEFAULT, duration_s=1.0, seed=1
    )
    search = Search(trial, stretch, 0.01, 0.1, near)
    rng, steps, runs = Random(seed), 0, list[Probe]()
    while probes := search.step():
        steps += 1
        runs += probes
        for probe in rng.sample(probes, len(probes)):
            assert not search.step() and not search.over
            search.ended(probe, 1.0 if probe.replicas / probe.share >= fewest else 0.5)
    assert search.over and len(runs) == len(set(runs))
    return search.fleet(), steps, len(runs)


@given(fewest=st.integers(1, 60), near=st.none() | st.integers(1, 60), seed=st.integers(0, 9))
def test_a_search_finds_the_fewest_whichever_run_ends_first(
    fewest: int, near: int | None, seed: int
) -> None:
    fleet, _, _ = searched(fewest, 400, near, seed)
    met = {count.replicas: count.attainment for count in fleet.counts}
    assert fleet.replicas == fewest and met[fewest] == 1.0
    assert fewest == 1 or met[fewest - 1] == 0.5


@given(fewest=st.integers(1, 60), seed=st.integers(0, 9))
def test_a_search_near_the_fewest_takes_two_runs_at_once(fewest: int, seed: int) -> None:
    _, steps, runs = searched(fewest, 400, fewest, seed)
    assert (steps, runs) == (1, min(fewest, 2))


def test_a_heavy_load_is_searched_by_shares_two_at_once_near_the_number() -> None:
    fleet, steps, runs = searched(20, WHOLE + 1, 20, 1)
    assert (fleet.replicas, steps, runs) == (20, 1, 2)


def test_the_fewest_gpus_are_chosen_and_no_draft_model_for_nothing() -> None:
    def fleet(replicas: int | None, gpus_each: int, *, draft: bool) -> Fleet:
        return Fleet(
            profile="p", gpu="g", gpus_each=gpus_each, draft=draft, replicas=replicas, counts=[]
        )

    plain, drafted = fleet(4, 1, draft=False), fleet(4, 1, draft=True)
    assert choose([drafted, plain, fleet(2, 4, draft=False), fleet(None, 1, draft=True)]) == plain
    assert choose([fleet(None, 1, draft=False)]) is None


def test_an_unknown_profile_is_told_before_the_trace_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = refused(capsys, *of_line("advise --trace no-such.csv --profile a100"))
    assert "a100" in told and "no-such.csv" not in told
