"""Tests of the example in docs/write-a-policy.md: read from the page, registered as the page says,
held to the properties of every policy, and run beside fcfs.
"""

import json
import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from loadgen.cli.main import main
from shared.policy import registry
from tests.shared.policy import test_policies as every_policy

PAGE = Path(__file__).parents[3] / "docs" / "write-a-policy.md"


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block is the module, the second its line in the registry."""
    code, line = fenced("python")
    file = tmp_path / "llf.py"
    file.write_text(code)
    spec = spec_from_file_location("llf", file)
    assert spec is not None
    assert spec.loader is not None
    llf = module_from_spec(spec)
    spec.loader.exec_module(llf)
    named = eval(f"{{{line}}}", {"Entry": registry.Entry, "llf": llf})
    for name, entry in named.items():
        monkeypatch.setitem(registry.POLICIES, name, entry)


@pytest.mark.parametrize(
    "holds",
    [
        every_policy.test_entries_stay_within_kv_and_target,
        every_policy.test_every_decode_runs_unless_it_was_preempted_for_lack_of_kv,
        every_policy.test_no_more_is_preempted_than_the_decodes_need,
        every_policy.test_best_effort_prefills_go_last_and_run_when_nothing_else_waits,
        every_policy.test_a_planned_view_is_planned_alike_again,
        every_policy.test_what_fits_the_context_and_the_kv_is_accepted,
    ],
)
def test_the_example_has_the_properties_of_every_policy(holds: Callable[..., None]) -> None:
    holds(name="llf")


def test_the_example_runs_beside_fcfs_and_holds_more_slos(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = next(line for line in fenced("bash")[0].splitlines() if "simulate" in line)
    words = command.removeprefix("slackline ").split()
    fcfs = [*words, "--set", "chunk_tokens=512"]
    fcfs[fcfs.index("llf")] = "fcfs"

    def violated(arguments: list[str]) -> float:
        assert main([*arguments, "--check", "50", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["finished"] == report["offered"] > 100
        return float(report["violated_fraction"])

    assert violated(words) < violated(fcfs)
