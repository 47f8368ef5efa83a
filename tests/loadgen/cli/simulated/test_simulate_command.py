"""Tests of `slackline simulate`: its JSON has stable keys, and the same values for the same seed. A
mistake in its arguments is told in one line.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from loadgen.cli.main import main
from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from loadgen.trials.figures import figures_of, long_prompts, token_gaps_s
from loadgen.trials.trial import Trial
from shared.rules.tiers import DEMO_3
from shared.vocabulary import Definition
from tests.loadgen.cli.command import of_line, printed, refused, without_wall

LOAD = "--workload mix --rate 4 --duration 8 --tiers demo-3 --seed 5 --policy fcfs"
COMMON = ["simulate", *LOAD.split()]


def test_the_progress_is_told_many_times_in_a_second_of_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr("rich.status.Status.update", lambda _, text: told.append(text))
    assert main([*COMMON, "--duration", "60"]) == 0
    shares = [
        int(share) for text in told for share in re.findall(r"60 s simulated \((\d+) %", text)
    ]
    assert len(set(shares)) >= 5
    assert shares == sorted(shares)
    assert re.search(r"\d+ of \d+ requests have ended", told[-1])
    assert any(re.search(r", about \d+ s left$", text) for text in told)


def test_a_note_explains_a_median_gap_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    drafts = of_line("--policy adaserve --draft 0.05 --acceptance 0.95")
    for more, noted in (([], False), (drafts, True)):
        assert main([*COMMON, "--duration", "3", *more]) == 0
        out = capsys.readouterr().out
        assert ("TBT p50 0 ms: several tokens came in one iteration" in out) is noted
        assert (" 0 ms " in out) is noted


def test_the_json_has_the_promised_keys_and_the_same_seed_gives_the_same_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = (
        printed(capsys, *COMMON, "--set", "chunk_tokens=512", "--latency", "live") for _ in range(2)
    )
    promised = (
        "policy profile replicas rate_rps seed definition offered finished violated "
        "violated_fraction by_tier by_importance by_length relegated preempted offloaded "
        "goodput_rps iterations simulated_s wall_s requests_per_wall_s"
    )
    assert set(promised.split()) <= set(one)
    tier = one["by_tier"]["interactive"]
    assert {"offered", "violated_fraction", "ttft_s", "tbt_s", "ttlt_s"} <= set(tier)
    assert set(tier["ttft_s"]) == {"p50", "p95", "p99"}
    assert set(one["by_length"]) == {"short", "long"}
    assert without_wall(one) == without_wall(two)
    assert one["offered"] == one["finished"]
    shown = [one[key] for key in ("rate_rps", "definition", "settings")]
    assert shown == [4.0, "deadline", {"chunk_tokens": "512"}]


def test_another_definition_judges_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    late = of_line("simulate --workload sharegpt --rate 5 --duration 8 --seed 5 --policy fcfs")
    found = [printed(capsys, *late, "--definition", name) for name in Definition]
    assert [one["definition"] for one in found] == list(Definition)
    assert len({one["iterations"] for one in found}) == 1
    deadline, _, _, ttlt, _ = (one["violated"] for one in found)
    assert 0 < ttlt < deadline  # fcfs is late with first tokens, and early with last ones
    for one in found:
        for by in ("by_tier", "by_length", "by_importance"):
            assert sum(group["violated"] for group in one[by].values()) == one["violated"]
        for group in one["by_tier"].values():
            assert sum(group["violations"].values()) == group["violated"]


def test_a_run_that_does_not_wait_counts_what_has_not_ended_as_violated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, *COMMON, "--wait", "0")
    assert found["finished"] < found["offered"]
    unfinished = sum(group["violations"]["unfinished"] for group in found["by_tier"].values())
    assert unfinished == found["offered"] - found["finished"]


def test_a_request_is_long_from_the_90th_percentile_on_that_included() -> None:
    requests = [
        PlannedRequest(n, 0.0, tokens, 1, "batch", 1.0, "default", "")
        for n, tokens in enumerate([*range(1, 11), 10])
    ]
    assert np.flatnonzero(long_prompts(requests)).tolist() == [9, 10]


def test_the_spreads_are_those_of_each_requests_own_tokens() -> None:
    tiers = ["interactive", "summary", "batch"]
    requests = [
        PlannedRequest(n, 0.3 * n, 200 + 40 * n, 1 + n % 7, tiers[n % 3], 1.0, "default", "")
        for n in range(30)
    ]
    deployment = Deployment("fcfs", "a100-llama3-8b")
    result = simulate(Traffic(requests, DEMO_3), deployment, RunOptions(keep_times=True))
    trial = Trial(deployment=deployment, tiers=DEMO_3, duration_s=9.0, seed=1)
    found = figures_of(trial, requests, result)
    times = result.token_unix_s
    assert times is not None
    for tier in tiers:
        of = [n for n, request in enumerate(requests) if request.tier == tier]
        gaps_s = np.concatenate([np.diff(times[n]) for n in of])
        tbt_s, ttft_s, ttlt_s = (
            getattr(found.by_tier[tier], name) for name in ("tbt_s", "ttft_s", "ttlt_s")
        )
        assert [tbt_s.p50, tbt_s.p95, tbt_s.p99] == pytest.approx(
            np.percentile(gaps_s, (50, 95, 99)).tolist(), rel=1e-5
        )
        assert ttft_s.p95 == pytest.approx(
            np.percentile([times[n][0] - requests[n].arrival_s for n in of], 95)
        )
        assert ttlt_s.p99 == pytest.approx(
            np.percentile([times[n][-1] - requests[n].arrival_s for n in of], 99)
        )


def test_gaps_never_span_two_requests_however_they_are_blocked() -> None:
    times = [[1.0, 1.5], [], [7.0], [9.0, 9.25, 9.75]]
    for block in (1, 2, 9):
        gaps_s, counts = token_gaps_s(times, block)
        assert gaps_s.tolist() == [0.5, 0.25, 0.5]
        assert counts.tolist() == [1, 0, 0, 2]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, "--replicas", "2", "--check", "50", "--important", "0.5"]) == 0
    out = capsys.readouterr().out
    for words in (
        "interactive",
        "TTFT 2.0 s",
        "iterations",
        "importance 10",
        "long prompts",
        "seed 5",
        "judged by deadline",
    ):
        assert words in out


def test_bounds_in_multiples_of_zero_load_time_are_judged_by_what_they_come_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, multiple in (("tight", 1.01), ("loose", 1000.0)):
        tier = {"slo": {"ttft_x": multiple, "tbt_x": multiple}}
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"name": name, "default": "one", "tiers": {"one": tier}})
        )
    tight, loose = (
        printed(capsys, *COMMON, "--tiers", str(tmp_path / f"{name}.json"))
        for name in ("tight", "loose")
    )
    assert tight["violated"] > 0 == loose["violated"]


LENGTHS_ONLY = "arrival_s,prompt_tokens,output_tokens\n,100,5\n,200,9\n"


def test_a_trace_of_lengths_needs_a_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.csv").write_text(LENGTHS_ONLY)
    trace = ["simulate", "--trace", str(tmp_path / "lengths.csv"), *COMMON[5:]]
    assert printed(capsys, *trace, "--rate", "3")["finished"] > 0
    assert "--rate is needed" in refused(capsys, *trace)
    assert "has no arrival times" in refused(capsys, *trace, "--arrivals", "trace")


def test_prefill_and_decode_apart_are_named_with_their_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    apart = of_line("--roles prefill,decode --replicas 2 --link 100 --duration 3")
    figures = printed(capsys, *COMMON, *apart)
    assert (figures["roles"], figures["link_gbit_s"]) == (["prefill", "decode"], 100.0)
    assert main([*COMMON, *apart]) == 0
    assert "2 replicas (prefill, decode, 100 Gbit/s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--roles prefil,decode --replicas 2 --link 100", "a role is both, prefill"),
        ("--roles prefill,decode --replicas 2", "need a link"),
        ("--roles prefill,decode --link 100", "more roles than replicas"),
        ("--link 0", "--link must be above 0"),
    ],
)
def test_roles_that_cannot_be_are_refused(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *COMMON, *of_line(options))
