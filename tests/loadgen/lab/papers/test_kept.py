"""The runs that the project keeps beside a page of docs/: what they save, and their truth."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.lab.papers import experiment, kept
from loadgen.lab.papers.__main__ import SECTIONS, main
from loadgen.lab.papers.cache import Cache
from loadgen.lab.papers.experiment import Run, RunResult, execute
from loadgen.lab.papers.job import next_run
from loadgen.lab.papers.page import render_page
from loadgen.lab.papers.pages import PAGES
from loadgen.lab.papers.section import Chapter, Page, Results, Section
from loadgen.lab.papers.slackline.systems import OURS

DOCS = Path(__file__).parents[4] / "docs"
TINY = Run(policy="fcfs", workload="azure-code", rate_rps=2.0, duration_s=30.0)
# The pages whose runs are kept, by now.
KEPT = [page for page in PAGES if kept.file_of(page, DOCS).exists()]
RUNS = (TINY, replace(TINY, policy="edf"))


def page_of(*runs: Run) -> Page:
    def render(results: Results, duration_s: float) -> str:
        return " ".join(str(results.figures(run) is not None) for run in runs)

    section = Section(name="a", title="A", paper="", hours=0.1, render=render, discussion="")
    return Page(
        file="a.md",
        introduction="",
        chapters=(Chapter(name="a", title="", setup="", sections=(section,)),),
    )


@pytest.fixture(scope="module")
def results() -> list[RunResult]:
    return [execute(run) for run in RUNS]


def test_a_page_keeps_the_runs_that_it_shows_and_a_fresh_cache_finds_them(
    tmp_path: Path, results: list[RunResult]
) -> None:
    cache, page, file = Cache(tmp_path / "cache"), page_of(*RUNS), tmp_path / "runs" / "a.jsonl.xz"
    assert kept.pack(page, {}, cache, file) == []
    assert not file.exists(), "nothing has run"
    unshown = replace(results[0], run=replace(TINY, seed=9))
    for result in (*results, unshown):
        cache.put(result)
    assert kept.pack(page, {}, cache, file) == []
    fresh = Cache(tmp_path / "fresh")
    kept.unpack(file, fresh)
    assert [fresh.get(run) for run in RUNS] == results
    assert fresh.get(unshown.run) is None
    assert kept.file_of(page, tmp_path) == file


def test_a_policy_that_changed_runs_again_alone_and_what_moved_is_told(
    tmp_path: Path, results: list[RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, file = page_of(*RUNS), tmp_path / "a.jsonl.xz"
    kept.write(file, [kept.KeptRun(result.run.version, result) for result in results])
    monkeypatch.setitem(experiment.POLICY_VERSIONS, "edf", 7)
    cache = Cache(tmp_path / "cache")
    kept.unpack(file, cache)
    assert [next_run(run, cache.get) for run in RUNS] == [None, RUNS[1]]
    assert kept.pack(page, {}, cache, file) == []
    assert len(kept.read(file)) == len(RUNS), "the run of before stays until it is done again"

    figures = results[1].figures
    assert figures is not None
    cache.put(replace(results[1], figures=replace(figures, violated_fraction=0.25)))
    told = kept.pack(page, {}, cache, file)
    assert len(told) == 1
    assert told[0].startswith("edf: azure-code at 2 requests/s")
    assert told[0].endswith("75.0 % met now")
    assert kept.read(file)[RUNS[1].key].version == 7
    assert kept.pack(page, {}, cache, file) == [], "told once"


def test_where_only_drafts_changed_no_run_without_them_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafting = replace(TINY, policy="edf", draft=0.05)
    runs = drafting, replace(drafting, draft=0.0), replace(drafting, policy="fcfs")
    before = [run.digest for run in runs]
    monkeypatch.setitem(experiment.DRAFT_VERSIONS, "edf", 7)
    assert [run.digest == digest for run, digest in zip(runs, before, strict=True)] == [
        False, True, True,
    ]  # fmt: skip


def test_where_only_importance_changed_no_run_of_equals_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiers = dict(TINY.tiers.tiers)
    name = next(iter(tiers))
    tiers[name] = replace(tiers[name], importance=3.0)
    unequal = replace(TINY, policy="edf", tiers=replace(TINY.tiers, tiers=tiers))
    equal = replace(TINY, policy="edf", important=0.0)
    runs = unequal, replace(equal, important=0.2), equal, replace(unequal, policy="fcfs")
    before = [run.digest for run in runs]
    monkeypatch.setitem(experiment.UNEQUAL_VERSIONS, "edf", 7)
    assert [run.digest == digest for run, digest in zip(runs, before, strict=True)] == [
        False, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("keep", [0, 20, 200])
def test_a_damaged_file_is_named_and_nothing_is_written(
    tmp_path: Path, results: list[RunResult], keep: int, capsys: pytest.CaptureFixture[str]
) -> None:
    page = next(page for page in PAGES if page.file == "slackline-results.md")
    file = kept.file_of(page, tmp_path)
    kept.write(file, [kept.KeptRun(result.run.version, result) for result in results])
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    file.write_bytes(file.read_bytes()[:keep])
    damaged = file.read_bytes()
    words = ["--render", "--only", "slackline-recovery", "--out", str(tmp_path)]
    assert main([*words, "--cache", str(tmp_path / "cache")]) == 2
    assert f"{file.name} is damaged" in capsys.readouterr().err
    assert file.read_bytes() == damaged
    assert not (tmp_path / page.file).exists()


def test_the_list_names_the_sections_that_a_change_of_policy_outdated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only", "slackline-recovery", "--cache", str(tmp_path), "--out", str(tmp_path)]
    assert main([*words, "--list"]) == 0
    assert "| slackline-recovery | 12 | slackline, " in capsys.readouterr().out
    assert not (tmp_path / "slackline-results.md").exists()


def test_a_clone_of_the_project_need_not_run_what_has_not_changed(
    tmp_path: Path, results: list[RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    page = next(page for page in PAGES if page.file == "slackline-results.md")
    section = SECTIONS["slackline-recovery"]
    runs = [job for job in section.jobs(3600 * section.hours) if isinstance(job, Run)]
    file = kept.file_of(page, tmp_path)
    kept.write(file, [kept.KeptRun(run.version, replace(results[0], run=run)) for run in runs])
    words = ["--only", section.name, "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main([*words, "--list"]) == 0
    assert "Nothing to run" in capsys.readouterr().out


# ---------------------------------------------------------------- the pages of docs/


@pytest.mark.slow
@pytest.mark.parametrize("page", KEPT, ids=lambda page: page.file)
def test_each_table_that_is_not_outdated_stands_in_the_page_as_its_runs_say(
    page: Page, tmp_path: Path
) -> None:
    """Nobody typed a figure into it."""
    cache = Cache(tmp_path)
    kept.unpack(kept.file_of(page, DOCS), cache)
    current = {
        section.name
        for section in page.sections
        if all(
            next_run(job, cache.get) is None
            for job in section.jobs(3600 * section.hours, cache.get)
        )
    }
    assert current, "every table is outdated: run `python -m loadgen.lab.papers --list`"
    present = (DOCS / page.file).read_text(encoding="utf-8")
    assert render_page(page, cache, {}, current, present) == present


@pytest.mark.slow
def test_the_loads_drawn_at_random_were_run_with_the_policy_as_it_is() -> None:
    """The three that take the least time are run again. A table that a change has outdated says
    nothing about the policy: raise its version, and run the section.
    """
    page = next(page for page in PAGES if page.file == "slackline-results.md")
    mine = [
        one
        for one in kept.read(kept.file_of(page, DOCS)).values()
        if one.result.run.policy == OURS and one.result.run.tiers.name.startswith("mix-")
    ]
    assert mine
    for one in sorted(mine, key=lambda one: one.result.wall_s)[:3]:
        assert one.version == one.result.run.version, (
            "run `python -m loadgen.lab.papers --only slackline-mixes`"
        )
        before, now = one.result.figures, execute(one.result.run).figures
        assert before is not None and now is not None
        # another processor may round otherwise, and a request of many end elsewhere
        assert now.violated == pytest.approx(before.violated, abs=2), (
            f"{one.result.run.tiers.name}: raise POLICY_VERSIONS in experiment.py"
        )
