"""Tests that the widest tables of the commands fit a terminal of 80 columns, with no word cut off.
The tables hold what a fleet of some size would give.
"""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, Group, RenderableType
from rich.table import Table

from loadgen.bench import figure, machine
from loadgen.cli.main import main
from loadgen.cli.top import screen
from loadgen.fleet.fleet_tables import replica_table, request_table, strip_table, tier_table
from loadgen.load.progress import Counter
from loadgen.load.report import side_by_side, table
from loadgen.load.tally import Tally
from loadgen.tables import fitted, plain_cells
from shared.console.collector import Collector
from shared.console.picture import Picture
from shared.rules.tiers import DEFAULT
from shared.schemas import RosterAnswer
from shared.vocabulary import FinishReason, ReplicaId, ServiceClass
from tests.loadgen.load.test_report import answered, reported
from tests.shared.console.heard import NOW, ack, announce, digest, ended, entry, held, plan

WIDTH = 80


class Shown:
    """The tables that a command printed, each with its lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: list[tuple[Table, list[str]]] = []
        before = Console.print

        def spy(console: Console, *things: Any, **options: Any) -> None:
            for thing in things:
                if isinstance(thing, Table):
                    assert console.width == WIDTH
                    self.tables.append((thing, lines_of(thing)))
            before(console, *things, **options)

        monkeypatch.setattr(Console, "print", spy)


def lines_of(thing: RenderableType) -> list[str]:
    console = Console(width=WIDTH, color_system=None)
    lines = console.render_lines(thing, pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def check(of: Table, lines: list[str]) -> None:
    """Nothing is wider than the terminal, and no word of any cell is cut off."""
    assert max(map(len, lines)) <= WIDTH, lines
    text = "\n".join(lines)
    assert "…" not in text.replace("…", "", str(plain_cells(of)).count("…")), text
    # a word that is longer than its column goes on in the next line
    found = re.sub(r"[\s│┃|]", "", text)
    for row in plain_cells(of):
        for cell in row:
            for word in re.findall(r"[^\s;,]+", cell):
                pieces = [word[:n] for n in (len(word), 12, 6)]
                assert any(piece in found or piece in text for piece in pieces), (word, text)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shown]:
    """Standard output is a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = Shown(monkeypatch)

    def run(*words: str) -> Shown:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert main(words) == 0
        return shown

    return run


@pytest.mark.parametrize("words", [("list",), ("show", "a100-llama3-8b")], ids=" ".join)
def test_the_tables_of_profiles_fit(words: tuple[str, ...], terminal: Callable[..., Shown]) -> None:
    shown = terminal("profile", *words)
    assert shown.tables
    for of, lines in shown.tables:
        check(of, lines)


def test_a_comparison_of_four_policies_has_a_column_for_each(
    terminal: Callable[..., Shown],
) -> None:
    load = ["--workload", "mix", "--rate", "4", "--duration", "4", "--jobs", "1", "--policies"]
    policies = "fcfs:chunk_tokens=512,edf:chunk_tokens=512,qoserve,slackline"
    [(of, lines)] = terminal("compare", *load, policies).tables
    check(of, lines)
    assert len(of.columns) == 6  # and not a paragraph for each row


def loaded() -> Tally:
    """A run over the four default tiers."""
    tally = Tally(DEFAULT)
    for number in range(400):
        tier = list(DEFAULT.tiers)[number % 4]
        answered(tally, number, [0.4 + number, 0.5 + 2 * number, 700.0 + number], tier)
    answered(tally, 400, [], "batch", FinishReason.REFUSED)
    return tally


def test_the_tables_of_load_and_of_reports_side_by_side_fit(
    terminal: Callable[..., Shown], tmp_path: Path
) -> None:
    report = reported(loaded(), "a policy with a name")
    check(table(report), lines_of(fitted(table(report), WIDTH)))
    progress = Counter(loaded(), 400, 60.0, "a policy with a name")
    progress.update()
    check(progress.table(12.0), lines_of(fitted(progress.table(12.0), WIDTH)))
    files = []
    for name in ("fcfs", "slackline with settings", "edf:chunk_tokens=512"):
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_bytes(msgspec.json.encode(reported(loaded(), name)))
    for of, lines in terminal("compare", *map(str, files)).tables:
        check(of, lines)
    of = side_by_side([report, report])
    check(of, lines_of(fitted(of, WIDTH)))


def busy_fleet() -> Picture:
    collector = Collector(NOW, DEFAULT)
    for n in range(1, 9):
        name, replica = f"replica-{n}", ReplicaId(f"replica-{n}")
        collector.hear_digest(digest(name, waiting=120, running=230, best_effort=999), NOW)
        collector.hear_announce(announce(name))
        slots = range(25)
        keys = [f"tenant-{n}.{'0123456789abcdef' * 2}-{slot}" for slot in slots]
        taken = [held(slot, key) for slot, key in zip(slots, keys, strict=True)]
        collector.hear_ack(ack(1, NOW, replica=name, held=taken), NOW)
        usual = {"prompt_tokens": 128_000, "generated_tokens": 9999}
        entries = [
            entry(
                slot,
                key,
                tier=list(DEFAULT.tiers)[slot % 4],
                service_class=list(ServiceClass)[slot % 5 == 0],
                **usual,
            )
            for slot, key in zip(slots, keys, strict=True)
        ]
        collector.hear_roster(replica, [], RosterAnswer(entries=entries), NOW)
        for seq in range(2, 60):
            collector.hear_plan(plan(seq, 0.02, name))
            did = dict.fromkeys(slots, (1, 1)) | ({0: (500, 0)} if seq % 3 else {})
            at = NOW + 0.02 * seq
            collector.hear_ack(ack(seq, at, did, name, exec_s=0.01 * (seq % 5)), at)
    for n in range(500):
        for tier in DEFAULT.tiers:
            collector.hear_ended(ended(f"a.{n}", n % 7 > 2, tier), NOW)
    return collector.picture(NOW + 1.2)


def test_the_tables_of_status_and_top_fit() -> None:
    picture = busy_fleet()
    for of in (
        tier_table(picture),
        replica_table(picture),
        strip_table(picture),
        request_table(picture.requests),
    ):
        check(of, lines_of(fitted(of, WIDTH)))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 60), (200, 50)])
def test_top_fills_the_terminal_and_no_more(width: int, height: int) -> None:
    console = Console(
        file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=True
    )
    for picture in (busy_fleet(), Collector(NOW).picture(NOW)):
        shown = screen(picture, console)
        assert isinstance(shown, Group)
        lines = console.render_lines(shown)
        assert all(sum(len(s.text) for s in line) <= width for line in lines)
        if height >= 50:
            assert len(lines) <= height


def test_the_table_of_the_bench_fits() -> None:
    report = figure.BenchReport(
        command="slackline bench",
        seed=1,
        quick=False,
        began="2026-11-24",
        took_s=100.0,
        machine=machine.describe(),
        figures=[
            *figure.spread("planning", "a step of the default policy", [0.001] * 9, p50=0.01),
            figure.Figure(
                part="one replica at the load of many",
                name="requests that one admission brings in",
                value=1234.5,
                unit="/s",
                least=1000.0,
                note="of eight that were offered, with two processes on one core each",
            ),
        ],
    )
    of = figure.table(report)
    check(of, lines_of(fitted(of, WIDTH)))


def test_a_table_that_is_cut_off_is_seen() -> None:
    """A check that finds nothing would pass for ever."""
    wide = Table(box=None)
    for n in range(12):
        wide.add_column(f"column-{n}", no_wrap=True)
    wide.add_row(*["0123456789"] * 12)
    with pytest.raises(AssertionError):
        check(wide, lines_of(wide))
