"""Tests of `slackline profile`: it lists and shows the shipped profiles, and fits new ones."""

import csv
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli.main import main
from loadgen.trials.profile_fit import COLUMNS, DRAFTS, FITTED, SECONDS
from shared.perf import profile_file as store
from shared.perf.shape import BatchShape
from tests.loadgen.cli.command import of_line, printed, refused

OF_A_SHAPE = (*BatchShape._fields, SECONDS)
WHO = of_line("--name my-gpu --gpu G --model M --kv-capacity-tokens 90000")


def fitted(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["profile", "fit", *words, *WHO]) == 0
    return json.loads(capsys.readouterr().out)


def written(path: Path, timings: Iterable[tuple[BatchShape, float]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["note", *OF_A_SHAPE])
        writer.writerows(["x", *shape, seconds] for shape, seconds in timings)
    return path


def measured(path: Path) -> Path:
    """Timings of batches of all three regimes by a shipped profile, with up to 2 % of scatter."""
    profile, rng = store.load("a100-llama3-8b"), random.Random(7)
    timings = []
    for i in range(300):
        decodes = 0 if i % 3 == 0 else rng.choice((1, 4, 16, 64, 128))
        shape = BatchShape(decodes=decodes, decode_context=decodes * rng.randint(1, 3000))
        for _ in range(0 if i % 3 == 1 else rng.randint(1, 2)):
            shape = shape.with_chunk(
                rng.choice((16, 64, 256, 512, 1024, 2048)), rng.choice((0, 0, 1000, 4000))
            )
        timings.append((shape, profile.batch_s(shape) * rng.uniform(0.98, 1.02)))
    return written(path, timings)


def test_every_shipped_profile_is_listed_with_what_it_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = printed(capsys, "profile", "list")
    assert [one["name"] for one in listed] == store.names()
    for one in listed:
        facts = "form error kv_capacity_tokens overhead_s gpu model tensor_parallel"
        assert set(facts.split()) <= set(one)
    assert main(["profile", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in store.names()) and "not stated" in out


def test_a_profile_is_shown_with_what_it_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "profile", "show", "a100-llama3-8b")
    profile = store.load("a100-llama3-8b")
    for one in shown["typical"]:
        assert one["batch_s"] == profile.batch_s(
            BatchShape(*(one[name] for name in BatchShape._fields))
        )
    assert shown["coefficients"]["form"] == shown["form"]
    assert main(["profile", "show", "a100-llama3-8b"]) == 0
    out = capsys.readouterr().out
    assert (
        "426,788 tokens" in out
        and "128 decodes on 1024 cached" in out
        and "1.0 ms per iteration" in out
    )


def test_a_fit_to_a_shipped_profile_comes_within_a_few_percent_and_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = measured(tmp_path / "t.csv"), tmp_path / "my-gpu.json"
    more = f"--out {out} --overhead 0.002 --tensor-parallel 2".split()
    assert main(["profile", "fit", str(path), *WHO, *more]) == 0
    assert "mean error" in capsys.readouterr().out
    file = store.read(str(out))
    assert file.error.mape is not None and file.error.mape < 0.04
    assert "60 of 300 iterations of t.csv, held out" in file.error.against
    assert (file.kv_capacity_tokens, file.tensor_parallel, file.overhead_s) == (90000, 2, 0.002)
    shape, true = (
        BatchShape(decodes=20, decode_context=20_000).with_chunk(700, 0),
        store.load("a100-llama3-8b"),
    )
    assert file.profile().batch_s(shape) == pytest.approx(true.batch_s(shape) + 0.002, rel=0.05)
    load = of_line("--workload azure-code --rate 2 --duration 3 --policy fcfs")
    assert printed(capsys, "simulate", *load, "--profile", str(out))["finished"] > 0


@pytest.mark.parametrize("form", FITTED)
def test_every_form_is_fitted_and_says_how_wrong_it_is(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fitted(capsys, str(measured(tmp_path / "t.csv")), "--form", form)
    assert found["coefficients"]["form"] == form
    assert 0 < found["error"]["mape"] < 0.25


def test_two_lines_are_found_where_there_are_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timings = [
        (BatchShape().with_chunk(tokens, 0), max(0.02, 0.005 + 6e-5 * tokens))
        for tokens in range(10, 1010, 10)
    ]
    path = str(written(tmp_path / "t.csv", timings))
    found = fitted(capsys, path, "--form", "slos_serve_roofline")["coefficients"]
    assert found["b_a"] + 250 * found["k1a"] == pytest.approx(0.02, rel=0.05)
    assert found["b_b"] + 1000 * found["k1b"] == pytest.approx(0.065, rel=0.02)


def test_drafts_that_decodes_verify_have_a_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, timings = random.Random(3), []
    for _ in range(200):
        decodes, drafts = rng.randint(1, 40), rng.randint(0, 40)
        seconds = 0.01 + 1e-4 * (decodes + drafts) + 3e-4 * drafts
        timings.append((BatchShape(drafts, decodes=decodes, drafts=drafts), seconds))
    found = fitted(capsys, str(written(tmp_path / "t.csv", timings)))["coefficients"]
    assert found["attention"]["v"] == pytest.approx(3e-4, rel=0.05)


HEADER = ",".join(COLUMNS) + "\n"
WITH_DRAFTS = ",".join((*COLUMNS, DRAFTS)) + "\n"
ROW = "16,1,256,0,0,0,0,0.01\n"


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (None, [], "cannot be read"),
        ("tokens,seconds\n1,2\n", [], "line 1: no column prefill_tokens"),
        (HEADER + 39 * ROW, [], "39 iterations are too few"),
        (HEADER + 40 * ROW + "16,1,256,0,0,0,0,-1\n", [], "line 42, column seconds"),
        (
            HEADER + 40 * ROW + "1.5,1,256,0,0,0,0,1\n",
            [],
            "line 42, column prefill_tokens: `1.5` is not a whole number",
        ),
        (HEADER + 40 * ROW + "16,1\n", [], "line 42, column prefill_sq"),
        (HEADER + 40 * ROW + "0,0,0,0,0,0,0,1\n", [], "line 42: an iteration must have tokens"),
        (WITH_DRAFTS + "8,0,8,0,0,4,400,0.01,9\n", [], "line 2, column drafts: decodes verify"),
        (WITH_DRAFTS + "8,1,64,0,0,0,0,0.01,8\n", [], "line 2, column drafts: decodes verify"),
        (WITH_DRAFTS + "8,0,8,0,0,4,400,0.01\n", [], "line 2, column drafts: `` is not"),
        (HEADER + 40 * ROW, ["--form", "forest"], "form `forest` is not fitted here"),
        (HEADER + 40 * ROW, ["--name", "My GPU"], "make no valid profile"),
        (HEADER + 40 * ROW, ["--kv-capacity-tokens", "0"], "make no valid profile"),
        (HEADER + 40 * ROW, ["--overhead", "-1"], "make no valid profile"),
        (
            HEADER + 40 * ROW,
            ["--out", "there/is/none.json"],
            "expected a .json file in a folder that exists",
        ),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    text: str | None,
    words: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "t.csv"
    if text is not None:
        path.write_text(text)
    assert says in refused(capsys, "profile", "fit", str(path), *WHO, *words)
