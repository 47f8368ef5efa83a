"""Adds options to the parser of a command, from lines of text that describe them."""

import argparse
import re
from inspect import cleandoc
from pathlib import Path
from typing import Any

OPTION = re.compile(
    r"(?P<name>--\S+)(?: (?P<metavar>\S+))?(?: \((?P<how>[a-z ]+)\))?"
    r"(?P<default> =(?: \S+)?)?: (?P<help>.+)"
)
NUMBERS = {"int": int, "float": float}


def add_options(parser: argparse._ActionsContainer, text: str) -> None:
    """Adds the options of these lines; an option without a value is a flag:

    --rate R (float): its help, which may go on in the next line
    --seed K = 0: the default says the type, and the help says the default, unless it does already
    --engine torch|sim = sim: words in small letters are all that it takes
    --set KEY=VALUE (repeated), or (required), or (required int): how it is given
    --json: a flag

    A FILE and a DIR are paths.
    """
    for part in re.split(r"\n(?=--)", cleandoc(text)):
        found = OPTION.fullmatch(" ".join(part.split()))
        assert found is not None, part
        name, metavar, words = found["name"], found["metavar"], found["help"]
        if metavar is None:
            parser.add_argument(name, action="store_true", help=words)
            continue
        how, default = (found["how"] or "").split(), found["default"]
        more: dict[str, Any] = {"type": next((NUMBERS[one] for one in how if one in NUMBERS), str)}
        if metavar in ("FILE", "DIR"):
            more["type"] = Path
        elif default is not None:
            more["type"] = _type_of(default[3:])
        if default is not None:
            more["default"] = more["type"](default[3:])
            if default[3:] and "(default" not in words:
                words += f" (default: {default[3:].removesuffix('.0')})"
        if metavar.islower() and "|" in metavar:
            more["choices"] = metavar.split("|")
        if "repeated" in how:
            more |= {"action": "append", "default": []}
        parser.add_argument(name, metavar=metavar, help=words, required="required" in how, **more)


def _type_of(default: str) -> type[int] | type[float] | type[str]:
    if default.isdecimal():
        return int
    return float if re.fullmatch(r"\d+\.\d+", default) else str
