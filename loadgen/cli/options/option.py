"""One way to add an option with a value to a command."""

import argparse
from collections.abc import Callable
from typing import Any


def add_option(
    parser: argparse._ActionsContainer,
    words: str,
    text: str,
    default: Any = None,
    type: Callable[[str], Any] | None = None,
) -> None:
    """Adds the option of `words`, such as `--rate R`, with its help. A default says the type, and
    the help says the default, unless it does already.
    """
    name, _, metavar = words.partition(" ")
    parse = type or (str if default is None else default.__class__)
    if default not in (None, "") and "(default" not in text:
        shown = f"{default:g}" if isinstance(default, float) else default
        text += f" (default: {shown})"
    parser.add_argument(name, type=parse, default=default, metavar=metavar or None, help=text)
