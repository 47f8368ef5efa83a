"""Tests of the tables that commands print: they fit a terminal of any width, and lose nothing."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.cli.simulated.profile import list_table
from loadgen.tables import print_line, print_table
from shared.perf import profile_file as profiles

WORD = st.text("abcdefgh0123456789%", min_size=1, max_size=9)
CELL = st.lists(WORD, max_size=5).map(" ".join)
NAME = st.text("abcdefgh-", min_size=1, max_size=20)


def printed(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    print_table(Console(file=out, width=width, color_system=None), table)
    return out.getvalue().splitlines()


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            st.lists(CELL, min_size=n, max_size=n),
            st.lists(st.tuples(NAME, st.lists(CELL, min_size=n, max_size=n)), min_size=1),
        )
    ),
    st.integers(40, 140),
    st.sampled_from([None, SIMPLE_HEAD]),
)
def test_a_table_fits_and_loses_nothing(
    content: tuple[list[str], list[tuple[str, list[str]]]], width: int, box: object
) -> None:
    headers, rows = content
    table = Table(box=box)  # type: ignore[arg-type]
    table.add_column("")
    for header in headers:
        table.add_column(header, justify="right")
    for name, cells in rows:
        table.add_row(name, *cells)
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    words = [word for line in lines for word in line.replace(";", " ").split()]
    for name, cells in rows:
        assert any(name in line for line in lines), "a row without its name"
        for cell in cells:
            assert set(cell.split()) <= set(words)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_profiles_are_listed_whole_at_any_width(width: int) -> None:
    files = [profiles.read(name) for name in profiles.names()]
    text = "\n".join(printed(list_table(files), width))
    assert max(map(len, text.splitlines())) <= width
    for file in files:
        assert file.name in text
        assert file.model.split()[0] in text


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_figure_and_its_unit_are_on_one_line(width: int) -> None:
    figures = ["12.3 ms", "4.0 %", "31.5 s", "1,234 tokens/s", "5.53 requests/s", "0.95 x", "7 MB"]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for name in ("latencies of each request", "shares and rates", "TTFT p50 / p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for n, each in enumerate(figures):
        others = [figures[(n + k) % len(figures)] for k in (1, 2, 3)]
        told = f"[bold]{each} in all, then {others[0]}[/]"
        table.add_row(f"row {n}", told, Text(" or ".join(others)), f"{each} / {others[1]}")
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    for each in figures:
        assert sum(line.count(each) for line in lines) == len(figures), (each, lines)


def test_a_line_is_broken_at_no_figure_either() -> None:
    out = io.StringIO()
    print_line(Console(file=out, width=30), "engines [busy] for all but 100 % of 40 s, or so")
    assert out.getvalue().splitlines() == ["engines [busy] for all but", "100 % of 40 s, or so"]
