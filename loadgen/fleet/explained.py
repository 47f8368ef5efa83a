"""Explains a configuration file: what each line sets, what that means, and when it counts."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from shared.process.reload import LIVE

HEADER = re.compile(r"^\s*\[\[?\s*(?P<path>[^\]#]+?)\s*\]\]?\s*(#.*)?$")
LINE = re.compile(r"^\s*(?P<path>(?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*[\w\"'*-]+)*)\s*=")
PART = re.compile(r"[\w*-]+|\"[^\"]*\"|'[^']*'")


class Explained(Struct, frozen=True, kw_only=True):
    """One line that sets something."""

    line: int
    key: str  # "tiers.chat.slo"
    text: str
    meaning: str  # empty: no such setting
    default: Any = None
    at_once: bool = False  # a running fleet takes a change over; else the next start does


def explain(text: str, schema: dict[str, Any]) -> Iterator[Explained]:
    """Each line of a TOML file that sets a key, with all lines of its value."""
    table: Sequence[str] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if (header := HEADER.match(line)) is not None:
            table = _parts(header["path"])
        elif (found := LINE.match(line)) is not None:
            path = (*table, *_parts(found["path"]))
            node = _node(path, schema)
            yield Explained(
                line=number,
                key=".".join(path),
                text=line.strip(),
                meaning=node.get("description", "") if node else "",
                default=node.get("default") if node else None,
                at_once=any(part in LIVE for part in path[:2]),
            )


def line_of(key: str, lines: Sequence[Explained]) -> int | None:
    """The line that sets a key; else the first that sets a key below it; else its table's line."""
    while key:
        for one in lines:
            if f"{one.key}.".startswith(f"{key}."):
                return one.line
        key = key.rpartition(".")[0]
    return None


def fields_beside(key: str, schema: dict[str, Any]) -> list[str]:
    """The fields of the table in which a key stands; none where it may have any."""
    node = _node(key.split(".")[:-1], schema)
    table = _table(node, schema) if node else None
    return list(table.get("properties", {})) if table else []


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in PART.findall(path))


def _node(path: Sequence[str], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of the value at a path; None: nothing may stand there."""
    node = schema
    for part in path:
        table = _table(node, schema)
        if table is None:
            return None
        within = table.get("properties", {}).get(part, table.get("additionalProperties"))
        if not isinstance(within, dict):
            return None
        node = within
    return node


def _table(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a schema that describes a table, if the value may be one."""
    if "$ref" in node:
        return _table(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    for choice in node.get("anyOf", ()):
        if (table := _table(choice, schema)) is not None:
            return table
    return node if node.get("type") == "object" else None
