"""The before/after tables in docstrings of the prediction, read as what they promise of a row."""

import inspect
import re
from collections.abc import Callable, Mapping

Row = dict[str, float]


def cases(method: Callable[..., object]) -> dict[str, dict[str, str]]:
    """Cell by column of the request table, by case."""
    text = inspect.getdoc(method) or ""
    lines = [line.strip() for line in text.splitlines() if "|" in line]
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert all(len(row) == len(head) for row in rows), "a row of another length"
    return {case: {row[0]: row[1 + i] for row in rows} for i, case in enumerate(head[1:])}


def promised(cells: Mapping[str, str], before: Row, names: Mapping[str, float]) -> Row:
    """The row after, by the cells: `.` the column stays, `+ x` and `- x` change it by x, x is its
    value. A column without a cell stays.
    """
    after = dict(before)
    for column, cell in cells.items():
        if cell == ".":
            continue
        # two factors beside each other are a product
        value = eval(re.sub(r"(\d) (\w)", r"\1 * \2", cell), {}, {**before, **names})
        after[column] = before[column] + value if cell[0] in "+-" else value
    return after
