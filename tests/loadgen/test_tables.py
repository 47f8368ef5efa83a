"""Tables fit a terminal of any width, and say what each row is about."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadgen.commands.profile import list_table
from loadgen.tables import print_table
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
