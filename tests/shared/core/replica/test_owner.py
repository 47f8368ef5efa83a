"""Tests that no other file of the replica's core writes the columns of the request table."""

import ast
from pathlib import Path

import shared.core.replica.request_table as request_table

TABLE = Path(request_table.__file__)
OWNERS = {TABLE, TABLE.with_name("shared_kv.py")}
OWNED = {*request_table.COLUMNS, "row_of", "acked_token_unix_s"}


def written(text: str) -> list[str]:
    """The columns of which the text assigns an element or a slice, by way of a local name too, and
    `overdrawn`.
    """
    tree = ast.parse(text)
    names = {
        target.id: column
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (column := _column(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for target in ast.walk(tree):
        if not isinstance(getattr(target, "ctx", None), ast.Store):
            continue
        if isinstance(target, ast.Attribute) and target.attr == "overdrawn":
            found.append(target.attr)
        elif isinstance(target, ast.Subscript):
            of = target.value
            column = names.get(of.id, "") if isinstance(of, ast.Name) else _column(of)
            found += [column] if column else []
    return found


def _column(node: ast.AST) -> str:
    """The column that this is a window on, or nothing."""
    while isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) and node.attr in OWNED else ""


def test_only_the_request_table_writes_its_columns() -> None:
    files = [path for path in TABLE.parent.glob("*.py") if path not in OWNERS]
    assert {path.name: found for path in files if (found := written(path.read_text()))} == {}
