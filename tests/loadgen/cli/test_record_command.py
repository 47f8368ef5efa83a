"""Tests of `slackline record`: which requests become rows of its trace, and a disk that is full."""

import gzip
from pathlib import Path

import pytest

from loadgen.cli.record import Recording
from loadgen.load.trace import read_trace
from shared.errors import ConfigError
from shared.schemas import Ended
from shared.vocabulary import RequestKey
from tests.made import verdict

BEGAN_UNIX_S = 1000.0


def ended(arrived_s: float, output_tokens: int = 5, *, known: bool = True) -> Ended:
    """The message that a request ended. Not `known`: it was refused before it was stored."""
    answered = verdict(output_tokens=output_tokens, prompt_tokens=20)
    return Ended(
        tier="chat",
        key=RequestKey("shop.1") if known else None,
        arrived_unix_s=BEGAN_UNIX_S + arrived_s,
        verdict=answered if known else None,
    )


@pytest.mark.parametrize("name", ["load.csv", "load.csv.gz"])
def test_requests_that_came_meanwhile_and_were_answered_are_rows(tmp_path: Path, name: str) -> None:
    recording = Recording(10.0)
    with recording.begun(tmp_path / name, BEGAN_UNIX_S) as write:
        for one in (
            ended(-1.0),  # came before
            ended(3.0, output_tokens=7),
            ended(2.0),  # ended after one that came later
            ended(4.0, output_tokens=0),  # no answer
            ended(0.0, known=False),
            ended(11.0),  # came after
        ):
            recording.hear(one)
        write()
    recording.hear(ended(5.0))  # the file is closed, so this one is in no count
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "rt") as file:
        assert [line.split(",")[0] for line in file] == ["arrival_s", "2.000000", "3.000000"]
    assert [each.name for each in tmp_path.iterdir()] == [name]
    rows = read_trace(tmp_path / name).rows
    assert [(row.arrival_s, row.prompt_tokens, row.output_tokens, row.tier) for row in rows] == [
        (0.0, 20, 5, "chat"),
        (1.0, 20, 7, "chat"),
    ]
    assert recording.in_words == "2 requests; 2 more had no answer, and are not in it"


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.symlink_to("/dev/full")
    with (
        pytest.raises(ConfigError, match=r"cannot write .*load\.csv: No space left on device"),
        Recording(10.0).begun(path, BEGAN_UNIX_S),
    ):
        pass
