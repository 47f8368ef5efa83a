"""Tests of `slackline` before any command runs: Ctrl-C ends it without a traceback."""

import signal
from collections.abc import Iterator
from typing import Never

import pytest

from loadgen.cli import main as cli
from loadgen.cli.main import INTERRUPTED, main


@pytest.fixture
def sigint() -> Iterator[None]:
    """The process handles Ctrl-C after the test as it did before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("words", [["up"], ["simulate", "--help"]])
def test_ctrl_c_while_a_command_is_imported_ends_without_a_traceback(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> Never:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert main(words) == INTERRUPTED
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a second one ends it at once"
