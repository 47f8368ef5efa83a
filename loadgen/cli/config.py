"""`slackline config`: checks a configuration, and says what its settings mean."""

import argparse
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen.fleet.explained import Explained, explain, fields_beside, line_of
from loadgen.fleet.section_settings import File, ask_services
from loadgen.markdown import wrap
from loadgen.tables import print_json
from shared.misfit import UNKNOWN_FIELD, there_are
from shared.process.configuration import FLEET_KEYS, PREFIX
from shared.written import reading, text_of

INDENT = " " * 11


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("check", "fields", "schema"),
        metavar="check|fields|schema",
        help="check: explain a file line by line, and say what is wrong. fields: every setting "
        "with its meaning and default, as Markdown. schema: the JSON Schema of the file",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="the configuration file, in TOML (default: the one named by SLACKLINE_CONFIG)",
    )
    parser.add_argument("--json", action="store_true", help="check: print JSON")


def run(args: argparse.Namespace) -> int:
    if args.what == "fields":
        print(wrap("\n".join(_markdown(ask_services({f"{PREFIX}CONFIG": ""})))))
        return 0
    if args.what == "schema":
        schema = ask_services({f"{PREFIX}CONFIG": ""}).schema
        print(msgspec.json.format(msgspec.json.encode(schema), indent=2).decode())
        return 0
    return _check(args.file or os.environ.get(f"{PREFIX}CONFIG", ""), args.json)


def _check(path: str, as_json: bool) -> int:
    """Print the configuration's faults. Returns 1 if a service would not start, else 0."""
    with reading(f"{path} cannot be read"):
        text = text_of(path) if path else ""
    file = ask_services({f"{PREFIX}CONFIG": str(Path(path).resolve()) if path else ""})
    lines = list(explain(text, file.schema))
    faults = list(dict.fromkeys(_faults(file, lines)))
    variables = sorted({
        setting.origin
        for section in file.sections
        for setting in section.set
        if setting.origin.startswith(PREFIX)
    })  # fmt: skip
    warnings = [each for section in file.sections for each in section.warnings]
    if as_json:
        made = {"file": path, "lines": lines, "environment": variables}
        made |= {"faults": faults, "warnings": warnings}
        print_json(made)
        return 1 if faults else 0
    print(f"{path or 'no file: every setting has its default'}")
    for line in lines:
        _print_line(line)
    if variables:
        _print("", f"the environment wins over the file: {', '.join(variables)}")
    for warning in warnings:
        _print("", f"note       {warning}")
    for fault in faults:
        print(f"wrong      {fault}", file=sys.stderr)
    if not faults:
        print("every service would start with it")
    return 1 if faults else 0


def _print_line(line: Explained) -> None:
    print(f"line {line.line:<5} {_short(line.text)}")
    if not line.meaning:
        return
    default = "" if line.default in (None, "", {}, []) else f" Default: {_plain(line.default)}."
    when = "A change counts at once." if line.at_once else "A change counts at the next start."
    _print(INDENT, f"{line.meaning}{default} {when}")


def _print(indent: str, text: str) -> None:
    print(textwrap.fill(text, 79, initial_indent=indent, subsequent_indent=indent))


def _short(text: str) -> str:
    return text if len(text) <= 68 else f"{text[:65]}..."


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _faults(file: File, lines: Sequence[Explained]) -> Iterator[str]:
    """Each fault with its line; one that several services find, once and without their names."""
    found = Counter(fault for section in file.sections for fault in section.faults)
    for section in file.sections:
        wrong = [setting for setting in section.set if setting.error]
        for setting in wrong:
            key, _, where = setting.origin.partition(" ")
            number = line_of(key, lines) if where else None
            # the line says where it is
            told = setting.error if number is None else setting.error.replace(f" {where}", "", 1)
            if told.endswith(UNKNOWN_FIELD) and (beside := fields_beside(key, file.schema)):
                told += f"; {there_are(key.rpartition('.')[2], beside)}"
            yield told if number is None else f"line {number}: {told}"
        for fault in section.faults:
            named = f"{section.section}: " if found[fault] == 1 else ""
            yield f"{named}{fault}"


def _markdown(file: File) -> Iterator[str]:
    """Lists of settings: shared by all services, of each section, of tiers and of tenants."""
    yield from _list("At the top of the file, for all services", _fleet(file))
    for section in file.sections:
        rows = {
            field.name: (field.meaning, field.default)
            for field in section.fields
            if not field.fleet or (section.section == "gateway" and field.name == "keys")
        }
        yield from _list(f"`[{section.section}]`", rows)
    for title, name in (
        ("`[tiers.NAME]`", "Tier"),
        ("`slo`", "Slo"),
        ("`[tenants.NAME]`", "Tenant"),
    ):
        properties = file.schema["$defs"][name]["properties"]
        rows = {
            key: (each.get("description", ""), each.get("default"))
            for key, each in properties.items()
        }
        yield from _list(title, rows)


def _fleet(file: File) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for section in reversed(file.sections):
        found |= {f.name: (f.meaning, f.default) for f in section.fields if f.fleet}
    return {name: found[name] for name in FLEET_KEYS}


def _list(title: str, rows: dict[str, tuple[str, Any]]) -> Iterator[str]:
    yield from (f"### {title}", "")
    for name, (meaning, default) in rows.items():
        shown = "" if default in (None, "", {}, []) else f" (`{_plain(default)}`)"
        yield f"- `{name}`{shown}: {meaning}"
    yield ""
