"""Tests of the options and notes by which a command finds the NATS server of a fleet."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.access import DEFAULT_URL, Access, add_access_arguments, noted
from loadgen.cli.main import main
from loadgen.fleet.ports import HOST, free_port


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which running fleets note their addresses."""
    monkeypatch.delenv("SLACKLINE_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "slackline"


def url_of(*words: str) -> str:
    parser = argparse.ArgumentParser()
    add_access_arguments(parser, "the operator")
    url: str = parser.parse_args(words).url
    return url


def other_url() -> str:
    return f"nats://{HOST}:{free_port()}"


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACKLINE_URL", "")
    assert url_of() == DEFAULT_URL


def test_the_fleet_of_the_user_is_found_whatever_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, named = other_url(), other_url()
    with noted(Access(mine)):
        assert url_of() == mine
        assert url_of("--url", named) == named
        monkeypatch.setenv("SLACKLINE_URL", named)
        assert url_of() == named
    monkeypatch.delenv("SLACKLINE_URL")
    assert url_of() == DEFAULT_URL


@pytest.mark.parametrize("words", [("status",), ("streams", "--workers", "r1")])
def test_of_two_fleets_none_is_taken_for_the_one_that_is_meant(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = sorted((other_url(), other_url()))
    nobody = other_url()
    with noted(Access(first)), noted(Access(second)):
        assert url_of() == DEFAULT_URL
        assert main([*words, "--url", nobody]) == 1
    told = capsys.readouterr().err
    assert f"no NATS server let us in at {nobody} " in told
    assert told.endswith(f": pass --url {first} or --url {second}, where your `slackline up` is\n")


def test_the_note_of_a_fleet_that_was_killed_counts_for_nothing(notes: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    url = other_url()
    with noted(Access(url)):
        (note,) = notes.iterdir()
        note.write_text(json.dumps(json.loads(note.read_text()) | {"pid": ended.pid}))
        assert url_of() == DEFAULT_URL
