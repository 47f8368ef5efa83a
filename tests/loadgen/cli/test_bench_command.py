"""`slackline bench` refuses what cannot be before it measures anything."""

from pathlib import Path

import pytest

from loadgen.cli.main import main


@pytest.mark.parametrize("out", ["file/report.json", "."])
def test_a_report_that_cannot_be_written_is_told_before_anything_is_measured(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "--only", "messages", "--quick", "--out", str(tmp_path / out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"slackline bench: --out {tmp_path / out}: it")
