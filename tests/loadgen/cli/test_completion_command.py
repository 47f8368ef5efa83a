"""Tests of `slackline completion`: shells complete commands, options and their values."""

import shutil
import subprocess
from pathlib import Path

import pytest

from loadgen.cli.completion import SHELLS, actions_of, whole_parser
from loadgen.cli.main import COMMANDS, main
from shared.policy import registry

ROOT = Path(__file__).parents[3]


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(text: str, *line: str) -> list[str]:
    """The words that bash offers to complete the last word of a line."""
    ask = (
        f"{text}\nCOMP_WORDS=({' '.join(repr(word) for word in line)}); "
        f"COMP_CWORD={len(line) - 1}; _shtab_slackline; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    found = subprocess.run(
        ["bash", "--norc", "-c", ask], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert found.stderr == ""
    return found.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_offers_commands_options_and_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    assert set(completed(text, "slackline", "")) == {*COMMANDS}
    assert completed(text, "slackline", "--v") == ["--version"]
    assert completed(text, "slackline", "sim") == ["simulate"]
    assert completed(text, "slackline", "up", "--eng") == ["--engine"]
    assert completed(text, "slackline", "up", "--engine", "") == ["torch", "vllm", "sim"]
    assert completed(text, "slackline", "completion", "f") == ["fish"]
    offered = completed(text, "slackline", "simulate", "--policy", "")
    assert set(registry.names()) <= set(offered)
    assert "README.md" in completed(text, "slackline", "load", "--trace", "REA")
    assert completed(text, "slackline", "nonsense", "--x") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command_and_option_and_its_shell_reads_it(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = script(shell, capsys)
    for name in COMMANDS:
        assert name in text
    for action in actions_of(whole_parser()):
        for option in action.option_strings:
            assert (option.removeprefix("--") if shell == "fish" else option) in text
    path = tmp_path / "script"
    path.write_text(text)
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} to read it")
    subprocess.run([shell, "-n", str(path)], check=True)
