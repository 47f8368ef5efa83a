"""Tables that fit the terminal. The first column says what a row is about, so it is always whole;
the others break between words. Where even that is too wide, each row becomes a paragraph.
"""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(console: Console, table: Table) -> None:
    console.print(fitted(table, console.width))


def fitted(table: Table, width: int) -> Table:
    """The table at most so many characters wide. It may be changed in place."""
    texts = [[_plain(cell) for cell in (c.header, *c.cells)] for c in table.columns]
    least = [_longest(text.split() for text in cells) for cells in texts]
    widths = [_longest(text.splitlines() for text in cells) for cells in texts]
    least[0] = widths[0]
    left, right = table.padding[3], table.padding[1]
    edges = len(widths) + 1 if table.box is not None else 0
    room = width - edges - len(widths) * (left + right)
    if sum(least) > room:
        return _paragraphs(table)
    if sum(widths) <= room:
        return table
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda n: (widths[n] > least[n], widths[n]))
        widths[widest] -= 1
    for column, its in zip(table.columns, widths, strict=True):
        column.width = its
        column.no_wrap = False
        column.overflow = "fold"
    return table


def plain_cells(table: Table) -> list[list[str]]:
    """The texts of the headers, and of each row."""
    columns = [[_plain(cell) for cell in (c.header, *c.cells)] for c in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _longest(texts: Iterable[Sequence[str]]) -> int:
    return max((len(piece) for pieces in texts for piece in pieces), default=0)


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _one_line(cell: object) -> str:
    return ", ".join(_plain(cell).splitlines())


def _paragraphs(table: Table) -> Table:
    """The same, a paragraph for each row: the first cell, then each other one with its header."""
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
        out.add_row(Text("  " + "; ".join(cells)))
    return out
