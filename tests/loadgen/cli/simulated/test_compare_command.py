"""Tests of `slackline compare`: it serves the same arrivals under each policy, beside the bound.
Results do not depend on the number of processes, which end with the command.
"""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.cli.main import main
from loadgen.trials.comparison import on_the_plane, parse_policies
from loadgen.trials.parallel import run_all
from shared.errors import ConfigError
from shared.perf import profile_file as store
from shared.vocabulary import FinishReason, Slo
from tests.loadgen.cli.command import of_line, printed, without_wall
from tests.made import verdict

ROOT = Path(__file__).parents[4]
LOAD = of_line("--workload mix --duration 8 --tiers demo-3 --seed 5")
COMPARE = ["compare", *LOAD, "--policies", "fcfs:chunk_tokens=512,edf"]


def test_each_policy_is_served_just_what_simulate_serves_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    judged = of_line("--rate 8 --definition mean-tpot")
    found = printed(capsys, *COMPARE, *judged, "--jobs", "1")
    shown = [found[key] for key in ("command", "seed", "definition", "rate_rps")]
    assert shown == ["compare", 5, "mean-tpot", 8.0]
    for one, words in zip(
        found["policies"], (["fcfs", "--set", "chunk_tokens=512"], ["edf"]), strict=True
    ):
        alone = printed(capsys, "simulate", *LOAD, *judged, "--policy", *words)
        assert without_wall(one) == without_wall(alone)
        assert one["offered"] == found["requests"]
    assert {"met_fraction", "violated_fraction"} <= set(found["bound"])


@pytest.mark.slow
def test_no_policy_is_better_than_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    for one in printed(capsys, *COMPARE, "--rates", "6,40", "--jobs", "1")["rates"]:
        assert all(
            found["violated_fraction"] >= one["bound"]["violated_fraction"] - 1e-9
            for found in one["policies"]
        )


@pytest.mark.slow
def test_the_results_do_not_depend_on_the_number_of_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone, together = (
        printed(capsys, *COMPARE, "--rates", "3,6", "--jobs", jobs) for jobs in ("1", "3")
    )
    assert without_wall(alone) == without_wall(together)
    assert [one["rate_rps"] for one in alone["rates"]] == [3.0, 6.0]


def test_people_get_a_column_per_policy_and_last_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMPARE, "--rate", "4", "--jobs", "1"]) == 0
    shown = capsys.readouterr()
    assert "judged by deadline" in shown.out
    head, _, every = shown.out.partition("─" * 20)
    assert " ".join(head.split()).endswith("fcfs bound chunk_tokens= without 512 edf drafts")
    all_, *rows = [line.split() for line in every.splitlines() if "%" in line]
    assert all_[0] == "all" and all_.count("%") == 3  # two policies, and the bound
    assert [row[0] for row in rows] == ["interactive", "summary", "batch", "short", "long"]
    assert all(row.count("%") == 2 for row in rows)
    runs, *ended = shown.err.splitlines()
    assert runs == "3 runs: bound, fcfs:chunk_tokens=512, edf at 4 requests/s"
    assert any("edf" in line for line in ended)


@pytest.mark.slow
def test_plots_are_written_and_say_what_they_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for rates in (["--rates", "3,6"], ["--rate", "3"]):
        folder = tmp_path / rates[1]
        assert main([*COMPARE, *rates, "--jobs", "1", "--plots", str(folder)]) == 0
        texts.append({path.name: path.read_text() for path in folder.iterdir()})
    over_load, at_one = texts
    each = ("violations", "latency", "plane")
    assert set(over_load) == {
        "violations-over-load.svg",
        "latency-over-load.svg",
        *(f"{n}-at-{r}.svg" for n in each for r in (3, 6)),
    }
    # the same to the last digit
    assert at_one == {f"{name}.svg": over_load[f"{name}-at-3.svg"] for name in each}
    for text in over_load.values():
        # matplotlib writes the text of each run of glyphs into a comment
        said = re.findall(r"<!-- (.*?) -->", text)
        assert any("seed 5" in line and "judged by deadline" in line for line in said)
        assert {"edf", "fcfs:chunk_tokens=512"} <= set(said)
    capsys.readouterr()


def test_the_plane_has_those_who_are_bound_in_both_latencies_over_their_bounds() -> None:
    """The plane is a plot of TTFT and mean TPOT; a request is a point in it."""
    done = verdict(output_tokens=9, ttft_s=0.5, mean_tpot_s=0.03)
    both = Slo(ttft_s=1.0, tbt_s=0.02)
    assert on_the_plane(done, both) == pytest.approx((0.5, 1.5))
    for one, slo in (
        (done, Slo(ttlt_s=9.0)),
        (done, Slo(ttft_s=1.0)),
        (replace(done, finish_reason=FinishReason.DROPPED), both),
        (replace(done, mean_tpot_s=None, output_tokens=1), both),
    ):
        assert on_the_plane(one, slo) is None


def test_policies_may_carry_settings() -> None:
    found = parse_policies(
        "fcfs:chunk_tokens=512, edf,qoserve:alpha_high_s=0.004+safety=1.1,fcfs:chunk_tokens=1024"
    )
    assert [one.policy for one in found] == ["fcfs", "edf", "qoserve", "fcfs"]
    assert found[2].settings == {"alpha_high_s": "0.004", "safety": "1.1"}


def test_what_goes_wrong_in_another_process_is_raised_here() -> None:
    with pytest.raises(ConfigError, match="b900"):
        list(run_all([partial(store.read, "b900"), partial(store.read, "cpu-tiny")], 2))


BLOCKED = """
import os, sys
from functools import partial
from loadgen.trials.parallel import run_all

def block(fifo):
    with open(fifo, "w") as out:
        print("begun", file=out, flush=True)
        read, write = os.pipe()
        os.read(read, 1)

if __name__ == "__main__":
    list(run_all([partial(block, sys.argv[1])] * 2, 2))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_it_is_interrupted_or_killed_its_processes_end_too(
    number: signal.Signals, tmp_path: Path
) -> None:
    fifo, script = tmp_path / "fifo", tmp_path / "blocked.py"
    os.mkfifo(fifo)
    script.write_text(BLOCKED)
    run = subprocess.Popen(
        [sys.executable, script, fifo],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        # a process that a shell starts in the background ignores SIGINT by default
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with fifo.open() as output:
        assert [output.readline(), output.readline()] == ["begun\n"] * 2
        run.send_signal(number)
        assert output.read() == ""  # the end of the file: no process has it open any more
    err = run.communicate()[1]
    assert run.returncode != 0
    # the script's own KeyboardInterrupt, which it does not catch, and none of a child's
    assert number == signal.SIGKILL or err.count("Traceback") <= 2
