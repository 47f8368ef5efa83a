"""Prints tables, and lines beside them, so that they fit the terminal. The first column says what
a row is about, so it is always whole; the others break between words, and never between a number
and its unit. Where even that is too wide, each row becomes a paragraph.
"""

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNIT = r"(?:%|x|[mu]?s|min|h|MB|GB|GiB|(?:tokens|requests)?/s)(?![\w/])"
BREAK = re.compile(rf"(?<!\d) | (?!{UNIT})")  # the spaces at which a line may end
INDENT = "  "


def output(plain_width: int = 120) -> Console:
    """Standard output, `plain_width` columns wide where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else plain_width, highlight=False)


def errors() -> Console:
    """Standard error, for notes and progress."""
    return Console(stderr=True, highlight=False)


def print_json(found: Any) -> None:
    """Print a command's result as one line of JSON, for `--json`."""
    print(msgspec.json.encode(found).decode())


def print_table(console: Console, table: Table) -> None:
    console.print(fitted(table, console.width))


def with_columns(table: Table, heads: str) -> Table:
    """The table with the columns `heads`, separated by `|`; those behind `>` are right-aligned."""
    for head in heads.split("|"):
        table.add_column(head.lstrip(">"), justify="right" if head.startswith(">") else "left")
    return table


def print_line(console: Console, line: str | Text) -> None:
    """Print a line, in several where it is too long. A plain text has no markup."""
    console.print(_broken(line if isinstance(line, Text) else Text(line), console.width))


def fitted(table: Table, width: int) -> Table:
    """The table, at most `width` characters wide."""
    texts = [[_plain(cell) for cell in (c.header, *c.cells)] for c in table.columns]
    least = [
        _longest(BREAK.split(line) for text in cells for line in text.splitlines())
        for cells in texts
    ]
    widths = [_longest(text.splitlines() for text in cells) for cells in texts]
    least[0] = widths[0]
    left, right = table.padding[3], table.padding[1]
    edges = len(widths) + 1 if table.box is not None else 0
    padded = len(widths) - (not table.pad_edge)
    room = width - edges - padded * (left + right)
    if sum(least) > room:
        return _paragraphs(table, width)
    if sum(widths) <= room:
        return table
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda n: (widths[n] > least[n], widths[n]))
        widths[widest] -= 1
    out = copy(table)
    out.columns, out.rows = [column.copy() for column in table.columns], []
    for column, its in zip(out.columns, widths, strict=True):
        column.header = _broken(column.header, its)
        column.width = its
        column.no_wrap = False
    for row, *cells in zip(table.rows, *(c.cells for c in table.columns), strict=True):
        broken = map(_broken, cells, widths)
        out.add_row(*broken, style=row.style, end_section=row.end_section)
    return out


def plain_cells(table: Table) -> list[list[str]]:
    """The texts of the headers, and of each row."""
    columns = [[_plain(cell) for cell in (c.header, *c.cells)] for c in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _longest(texts: Iterable[Sequence[str]]) -> int:
    return max((len(piece) for pieces in texts for piece in pieces), default=0)


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def _plain(cell: object) -> str:
    return _text(cell).plain


def _one_line(cell: object) -> str:
    return ", ".join(_plain(cell).splitlines())


def _broken(cell: object, width: int) -> Text:
    """The cell in lines of at most `width`, unless a piece is longer."""
    text = _text(cell).copy()
    text.plain = "\n".join(_lines(line, width) for line in text.plain.split("\n"))
    return text


def _lines(line: str, width: int) -> str:
    first, *rest = BREAK.split(line)
    lines = [first]
    for piece in rest:
        longer = f"{lines[-1]} {piece}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(piece)
    return "\n".join(lines)


def _paragraphs(table: Table, width: int) -> Table:
    """The table as a paragraph for each row: the first cell, then the others with their headers."""
    out = Table(title=table.title, title_justify="left", box=None, show_header=False)
    out.add_column(overflow="fold")
    headers = [_one_line(column.header) for column in table.columns]
    rows: Sequence[tuple[object, ...]] = list(zip(*(c.cells for c in table.columns), strict=True))
    for first, *rest in rows:
        cells = [
            f"{header} {_one_line(cell)}".strip()
            for header, cell in zip(headers[1:], rest, strict=True)
            if _plain(cell)
        ]
        out.add_row(Text(_one_line(first), style="bold"))
        lines = _lines("; ".join(cells), width - len(INDENT) - 2)  # 2: the column's padding
        out.add_row(Text(textwrap.indent(lines, INDENT)))
    return out
