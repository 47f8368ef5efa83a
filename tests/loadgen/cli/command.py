"""Runs commands of `slackline` within a test's process, and reads what they print."""

import json
from typing import Any

import pytest

from loadgen.cli.main import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON that the command prints."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def without_wall(found: Any) -> Any:
    """The command's JSON without wall times, which differ from run to run."""
    wall = ("wall_s", "requests_per_wall_s")
    if isinstance(found, dict):
        return {key: without_wall(value) for key, value in found.items() if key not in wall}
    return [without_wall(one) for one in found] if isinstance(found, list) else found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of error with which a command refuses these words."""
    try:
        code: object = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("slackline") and error.count("\n") == 1
    return error


def of_line(line: str) -> list[str]:
    """The words of a line, as a shell gives them to a command."""
    return line.split()
