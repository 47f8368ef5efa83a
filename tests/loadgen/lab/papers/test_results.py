"""Tests of the program that makes the tables of docs/laboratory.md (our results beside the
papers'): its runs, how it goes on after a break, and what it writes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.lab.papers import execution
from loadgen.lab.papers.__main__ import RUNS, TABLES, main
from loadgen.lab.papers.execution import Task, run
from loadgen.lab.papers.run import VERSIONS, WITHOUT, Run, RunResult, execute
from loadgen.lab.papers.search import Search, advance, next_run
from loadgen.lab.papers.slackline import COLUMNS, SEEDS
from loadgen.lab.papers.store import KeptRun, Store, write
from loadgen.lab.papers.table import MISSING, Row, Table, present, render, reproduced
from loadgen.lab.papers.values import (
    Found,
    Results,
    Value,
    ahead,
    extreme,
    geometric,
    highest,
    of,
    over,
    together,
    violated,
)
from shared.policy import registry
from shared.rules.tiers import load_tiers

PAGE = Path(__file__).parents[4] / "docs" / "laboratory.md"
TINY = Run(policy="fcfs", workload="azure-code", rate_rps=2.0, duration_s=30.0)
LIMIT_RPS = 3.3


@pytest.fixture(scope="module")
def tiny() -> RunResult:
    return execute(TINY)


@pytest.fixture(scope="module")
def kept() -> Store:
    """The runs that the project keeps beside the page."""
    return Store(Path("nowhere"), PAGE.parent / RUNS)


def limited(
    tiny: RunResult, limits: dict[str, float], calls: list[Run]
) -> Callable[..., RunResult]:
    """A stand-in for the simulation: runs above the limit of their policy are stopped."""

    def executed(run: Run) -> RunResult:
        calls.append(run)
        passes = run.rate_rps <= limits.get(run.policy, LIMIT_RPS)
        return replace(tiny, run=run, figures=tiny.figures if passes else None)

    return executed


def task(job: Run | Search, folder: Path) -> Task:
    return Task("tiny", job, folder, folder / "kept.xz")


def value(*each: float) -> Value:
    return lambda results: Found(each)


# ---------------------------------------------------------------- runs


def test_a_silo_serves_its_tier_alone_and_a_prefill_node_ends_with_the_first_token(
    tiny: RunResult,
) -> None:
    assert tiny.figures is not None
    silo = execute(replace(TINY, only="Q2")).figures
    assert silo is not None
    assert silo.by_tier.keys() == {"Q2"}
    assert silo.offered == tiny.figures.by_tier["Q2"].offered
    first = execute(replace(TINY, first_token_only=True)).figures
    assert first is not None
    assert first.tokens == first.offered == tiny.figures.offered


def test_a_run_that_misses_too_many_is_stopped_and_has_no_figures() -> None:
    assert execute(replace(TINY, rate_rps=30.0, most_violated=0.01)).figures is None


@pytest.mark.parametrize("definition", ["mean-tpot", "max-tpot-10"])
def test_a_run_is_stopped_by_its_own_definition(definition: str) -> None:
    run = replace(
        TINY,
        workload="chatbot",
        tiers=load_tiers("sola-llama3-8b-tight"),
        definition=definition,
        rate_rps=8.0,
        profile="a100-llama3-8b",
    )
    whole = execute(run).figures
    assert whole is not None and 0 < whole.violated_fraction < 1, "a load that some survive"
    same = execute(replace(run, most_violated=whole.violated_fraction)).figures
    assert same is not None and same.by_tier == whole.by_tier
    assert execute(replace(run, most_violated=whole.violated_fraction / 2)).figures is None


def test_a_run_has_a_name_of_its_own_however_its_numbers_are_written() -> None:
    others = [
        replace(TINY, policy="edf"),
        replace(TINY, settings={"chunk_tokens": "512"}),
        replace(TINY, rate_rps=2.5),
        replace(TINY, seed=2),
        replace(TINY, draft=0.1),
        replace(TINY, kv_tokens=1000),
    ]
    assert len({run.key for run in [TINY, *others]}) == len(others) + 1
    assert replace(TINY, rate_rps=2, duration_s=30).key == TINY.key


# ---------------------------------------------------------------- storing


def test_results_are_read_back_and_those_of_a_policy_as_it_was_are_not(
    tmp_path: Path, tiny: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, edf = Store(tmp_path), replace(tiny, run=replace(TINY, policy="edf"))
    assert store.get(TINY) is None
    store.put(tiny)
    store.put(edf)
    assert store.get(TINY) == tiny and store.get(edf.run) == edf
    monkeypatch.setitem(VERSIONS, "fcfs", 2)
    assert store.get(TINY) is None and store.get(edf.run) == edf


def test_kept_runs_are_found_on_a_fresh_clone(
    tmp_path: Path, tiny: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs" / "kept.xz"
    Store(tmp_path, file).keep([tiny])
    fresh = Store(tmp_path / "fresh", file)
    assert fresh.get(TINY) == tiny
    monkeypatch.setitem(VERSIONS, "fcfs", 2)
    assert fresh.get(TINY) is None, "outdated"


@pytest.mark.parametrize("keep", [0, 20, 200])
def test_a_damaged_file_is_named_and_nothing_is_written(
    tmp_path: Path, tiny: RunResult, keep: int, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "page.md", tmp_path / RUNS
    page.write_text("as it was")
    write(file, [KeptRun(1, replace(tiny, run=replace(TINY, seed=n))) for n in range(9)])
    file.write_bytes(file.read_bytes()[:keep])
    assert main(["--render", "--page", str(page)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert page.read_text() == "as it was"


# ---------------------------------------------------------------- searching, and going on


def test_a_search_ends_within_its_precision_below_the_limit(
    tmp_path: Path, tiny: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "execute", limited(tiny, {}, []))
    for first_rps in (0.1, 3.0, 40.0):
        search = Search(run=replace(TINY, rate_rps=first_rps))
        task(search, tmp_path)()
        found = advance(search, Store(tmp_path).get)
        assert isinstance(found, float)
        assert LIMIT_RPS / 1.03 <= found <= LIMIT_RPS


def test_a_first_rate_that_fails_is_followed_by_one_a_little_lower(
    tmp_path: Path, tiny: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Run] = []
    monkeypatch.setattr(execution, "execute", limited(tiny, {}, calls))
    task(Search(run=replace(TINY, rate_rps=3.6)), tmp_path)()
    assert [run.rate_rps for run in calls[:2]] == [3.6, 3.06]


def test_work_that_was_broken_off_goes_on_where_it_stopped(
    tmp_path: Path, tiny: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = list[Run](), list[Run]()
    search = Search(run=TINY)
    monkeypatch.setattr(execution, "execute", limited(tiny, {}, whole))
    run([task(search, tmp_path / "whole")], 1)
    executed = limited(tiny, {}, parts)

    def breaks_off(run: Run) -> RunResult:
        if len(parts) == 3:
            raise KeyboardInterrupt
        return executed(run)

    monkeypatch.setattr(execution, "execute", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        run([task(search, tmp_path / "parts")], 1)
    monkeypatch.setattr(execution, "execute", executed)
    run([task(search, tmp_path / "parts")], 1)
    assert parts == whole


def _same(one: RunResult, other: RunResult) -> bool:
    """Tells whether two results agree, but for the time that they took."""
    assert one.figures is not None and other.figures is not None
    return one.figures.by_tier == other.figures.by_tier


def test_two_processes_make_the_same_as_one(tmp_path: Path) -> None:
    runs = [replace(TINY, policy=policy) for policy in ("fcfs", "edf")]
    for processes in (1, 2):
        run([task(one, tmp_path / str(processes)) for one in runs], processes)
    one, two = (Store(tmp_path / str(processes)) for processes in (1, 2))
    for each in runs:
        first, second = one.get(each), two.get(each)
        assert first is not None and second is not None and _same(first, second)


# ---------------------------------------------------------------- values and tables


def test_values_are_combined_seed_by_seed() -> None:
    results = Results(lambda _: None)
    mine, theirs = value(6.0, 8.0), value(2.0, 16.0)
    assert ahead(mine, theirs)(results) == Found((4.0, -8.0))
    assert over(mine, theirs)(results) == Found((3.0, 0.5))
    assert highest(mine, theirs)(results) == Found((6.0, 16.0))
    assert geometric(value(2.0), value(8.0))(results) == Found((4.0,))
    assert extreme(max, [("a", mine), ("b", theirs)])(results) == Found((2.0, 16.0), "b")
    assert extreme(min, [("a", mine), ("b", theirs)])(results) == Found((6.0, 8.0), "a")


def test_what_has_not_run_has_no_value_and_is_asked_for(tiny: RunResult) -> None:
    edf = replace(TINY, policy="edf")
    results = Results(lambda run: tiny if run == TINY else None)
    assert over(of(violated, TINY), of(violated, edf))(results) is None
    assert results.requested == [TINY, edf]
    assert of(violated, TINY)(results) is not None


def test_silos_are_weighed_by_their_requests(tiny: RunResult) -> None:
    assert tiny.figures is not None
    edf = replace(TINY, policy="edf")
    figures = {
        "fcfs": replace(tiny.figures, offered=300, violated=30),
        "edf": replace(tiny.figures, offered=100, violated=50),
    }
    results = Results(lambda run: replace(tiny, figures=figures[run.policy]))
    assert together([TINY, edf])(results) == Found((20.0,))


def test_a_cell_has_the_published_value_and_is_bold_where_ours_is_far_from_it() -> None:
    asked = of(violated, TINY)
    row = Row("figure1", "what", [value(2.0, 2.5), value(2.4), None, asked], (2.0, 2.0, None, 9.0))
    table = Table("t", ("", "", "a", "b", "c", "d"), [row])
    text, records = render(table, Results(lambda _: None))
    assert "| figure1 | what | 2.25 (2) | **2.4** (2) |  | not run (9) |" in text
    assert records == [{"row": ["figure1", "what"], "by_seed": [[2.0, 2.5], [2.4], None, None]}]


@pytest.mark.parametrize(
    ("ours", "published", "percent", "near"),
    [
        (2.3, 2.0, False, True),
        (2.31, 2.0, False, False),
        (1.69, 2.0, False, False),
        (0.4, 0.0, True, True),
        (0.6, 0.0, True, False),
    ],
)
def test_a_figure_is_reproduced_within_15_percent_or_half_a_point(
    ours: float, published: float, percent: bool, near: bool
) -> None:
    assert reproduced(ours, published, percent=percent) == near


@pytest.mark.parametrize("name", TABLES)
def test_what_a_table_asks_for_can_be_run(name: str) -> None:
    asked = TABLES[name].jobs(lambda _: None)
    assert asked
    for job in asked:
        run = next_run(job, lambda _: None)
        assert run is not None
        registry.make(run.policy, {k: v for k, v in run.settings.items() if k != WITHOUT})
        assert run.only in ("", *run.tiers.tiers)


def test_the_command_prints_a_short_run_and_writes_a_whole_one(
    tmp_path: Path,
    tiny: RunResult,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(execution, "execute", limited(tiny, {"fcfs": 99, "qoserve": 99}, []))
    page = tmp_path / "page.md"
    page.write_text("Prose.\n\n<!-- table qoserve-silos -->\n\n| 7 |\n\n<!-- end -->\n\nMore.\n")
    words = ["--only", "table4", "--jobs", "1", "--page", str(page)]
    words += ["--cache", str(tmp_path / "cache")]
    assert main([*words, "--render"]) == 0
    assert "| 7 |" in page.read_text(), "no figure gives way to a run that is missing"
    assert main([*words, "--hours", "0.01"]) == 0
    assert "0.01 h;" in capsys.readouterr().out
    assert "| 7 |" in page.read_text()
    assert main(words) == 0
    text = page.read_text()
    assert text.startswith("Prose.\n") and text.endswith("More.\n")
    assert "| table4 | 13 GPUs in silos (7, 3, 3) |" in text and MISSING not in text
    assert (tmp_path / RUNS).exists()
    assert main([*words, "--hours", "0"]) == 2


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize("name", TABLES)
def test_each_table_stands_in_the_page_as_its_runs_say(name: str, kept: Store) -> None:
    """Where the runs are not kept: with its rows and what the papers printed."""
    text = present(PAGE.read_text(), name)
    rendered, _ = render(TABLES[name], Results(kept.get))
    if MISSING not in rendered:
        assert text == rendered
    else:
        lines = zip(text.splitlines(), rendered.splitlines(), strict=True)
        assert all(_as_published(a) == _as_published(b) for a, b in lines if a.startswith("|"))


def _as_published(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    return [*cells[:1], *(cell[cell.find("(") :] for cell in cells[2:] if "(" in cell)]


def test_the_table_of_slackline_was_made_with_the_policy_as_it_is(kept: Store) -> None:
    """The three runs that take the least time are run again. A table that a change has outdated
    says nothing about the policy: raise its version, and run the table.
    """
    runs = [replace(run, seed=SEEDS[0]) for run in COLUMNS.values()]
    mine = [one for run in runs if (one := kept.kept.get(run.key)) is not None]
    assert len(mine) == len(runs)
    for one in sorted(mine, key=lambda one: one.result.wall_s)[:3]:
        assert one.version == one.result.run.version, "--only slackline"
        before, now = one.result.figures, execute(one.result.run).figures
        assert before is not None and now is not None
        # another processor may round otherwise, and a request of many end elsewhere
        assert now.violated == pytest.approx(before.violated, abs=2), "raise VERSIONS in run.py"
