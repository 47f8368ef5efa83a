"""`slackline` itself, whatever the command."""

from typing import Never

import pytest

from loadgen import cli
from loadgen.cli import INTERRUPTED, main


@pytest.mark.parametrize("words", [["up"], ["simulate", "--help"]])
def test_ctrl_c_while_a_command_is_imported_ends_without_a_traceback(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> Never:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert main(words) == INTERRUPTED
    assert capsys.readouterr() == ("", "")
