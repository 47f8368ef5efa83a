"""Tests of the laboratory of routers: rows are kept and drawn, and an old index finds less."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.lab.routers.__main__ import main
from loadgen.lab.routers.runs import Job, requests_of, run

ASKED = ["--load", "agent-loops", "--router", "ours", "--part", "0.1", "--jobs", "1", "--seed", "3"]


def test_a_row_is_computed_once_and_the_same_rows_draw_the_same_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.jsonl"
    told, drawn = [], []
    for n in range(2):
        folder = tmp_path / str(n)
        folder.mkdir()
        more = ["--replicas", "1", "--replicas", "2", "--rows", str(kept), "--plots", str(folder)]
        main([*ASKED, *more])
        told.append(capsys.readouterr().out.splitlines()[:-2])
        drawn.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert told[0] == told[1] and len(told[0]) == 4
    assert len(kept.read_bytes().splitlines()) == 2
    assert drawn[0] == drawn[1] and drawn[0].keys() == {"prefixes.svg", "prefixes-latency.svg"}


def test_an_index_that_is_old_finds_less_and_arrivals_grow_with_the_replicas() -> None:
    job = Job(load="agent-loops", router="ours", replicas=2, seed=3, part=0.1)
    now, old = (run(replace(job, late_s=s)) for s in (0.0, 20.0))
    assert old.found < now.found
    assert 1.0 <= now.imbalance < 2.0
    one, two = (requests_of(Job(load="rag", router="ours", replicas=n, seed=3)) for n in (1, 2))
    assert len(two) == pytest.approx(2 * len(one), rel=0.2)
