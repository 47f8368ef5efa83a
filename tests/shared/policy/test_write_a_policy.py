"""Tests of the example in docs/write-a-policy.md: read from the page, saved in a file of its own,
held to the properties of every policy, and run beside fcfs as the page says.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.cli.main import main
from shared.errors import ConfigError
from shared.policy import registry
from shared.vocabulary import Slo
from tests.shared.policy import test_policies as every_policy
from tests.shared.policy.views import NOW, Row, decode, interactive, view
from tests.shared.routing.digests import offer

PAGE = Path(__file__).parents[3] / "docs" / "write-a-policy.md"
CLASS = "LeastSlackFirst"


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def llf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the example's policy; its file is in the folder that a test runs in."""
    monkeypatch.chdir(tmp_path)
    [code] = fenced("python")
    Path("llf.py").write_text(code)
    return f"{tmp_path}/llf.py:{CLASS}"


@pytest.mark.parametrize(
    "holds",
    [
        every_policy.test_entries_stay_within_kv_and_target,
        every_policy.test_every_decode_runs_unless_it_was_preempted_for_lack_of_kv,
        every_policy.test_no_more_is_preempted_than_the_decodes_need,
        every_policy.test_best_effort_prefills_go_last_and_run_when_nothing_else_waits,
        every_policy.test_a_planned_view_is_planned_alike_again,
    ],
)
def test_the_example_has_the_properties_of_every_policy(
    llf: str, holds: Callable[..., None]
) -> None:
    holds(name=llf)


def test_it_declines_relegates_and_promotes(llf: str) -> None:
    policy = registry.make(llf)
    soon, later = (
        offer(slo=Slo(ttft_s=ttft_s), next_due_unix_s=NOW + ttft_s, prompt_tokens=4000)
        for ttft_s in (0.01, 60.0)
    )
    declined, accepted = policy.admit(view([decode(interactive(0))]), [soon, later])
    assert accepted.accepted
    assert (declined.accepted, declined.earliest_s) == (False, pytest.approx(0.5, abs=0.5))
    assert "late" in declined.reason
    rows = [
        Row(slot=1, target=4000, arrived_s=-9.0, ttft_s=1.0),
        Row(slot=2, target=40, arrived_s=0.0, ttft_s=60.0, best_effort=True),
    ]
    (choice,) = policy.plan(view(rows))
    assert (list(choice.relegate), list(choice.promote)) == ([1], [2])


def test_the_commands_of_the_page_run_and_it_holds_more_slos_than_fcfs(
    llf: str, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated, compared, _ = fenced("bash")[0].replace("\\\n", "").splitlines()
    assert main([*shlex.split(simulated)[1:], "--check", "50", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["finished"] == report["offered"] > 100
    assert main([*shlex.split(compared)[1:], "--jobs", "1", "--json"]) == 0
    fcfs, own = json.loads(capsys.readouterr().out)["violated_fraction"]
    assert own["mean"] < fcfs["mean"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Other:\n    def plan(self): ...", r"no class 'LeastSlackFirst'.*there are: Other"),
        ("raise ValueError('oh')", "ValueError: oh"),
        ("class LeastSlackFirst:\n    def plan(self): ...", "must take `settings`"),
    ],
)
def test_a_file_without_such_a_policy_is_told_in_one_line(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        registry.make(f"{tmp_path}/own.py:{CLASS}")
    with pytest.raises(ConfigError, match="No such file"):
        registry.make(f"{tmp_path}/none.py:{CLASS}")


def test_an_installed_package_names_its_policy(
    llf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "llf-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: llf\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[slackline.policies]\nleast = llf:{CLASS}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.make("least", {"most_tokens": "64"}).name == "llf"
    with pytest.raises(ConfigError, match="no setting most"):
        registry.make("least", {"most": "64"})
