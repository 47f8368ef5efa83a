"""Writes generated Markdown: tables, and lines of 100 columns."""

import re
import textwrap
from collections.abc import Sequence

COLUMNS = 100
AS_IT_IS = (
    "#",
    "|",
    "![",
    "```",
    "---",
    ">",
    "    ",
)  # the beginnings of blocks that keep their lines


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in (headers, *rows))
    return "\n".join([head, "|---" * len(headers) + "|", *lines])


def wrap(markdown: str) -> str:
    """The Markdown with its paragraphs and lists in lines of COLUMNS.

    Headings, tables, pictures, quotations, front matter and code stay as they are. No line breaks
    inside `code`.
    """
    return "\n\n".join(_wrap_block(block) for block in markdown.split("\n\n"))


def _wrap_block(block: str) -> str:
    if block.startswith(AS_IT_IS):
        return block
    return "\n".join(_wrap_item(item) for item in re.split(r"\n(?=- )", block))


def _wrap_item(item: str) -> str:
    """One paragraph, or one item of a list."""
    unbroken = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(item.split()))
    lines = textwrap.wrap(
        unbroken,
        COLUMNS,
        subsequent_indent="  " if item.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")
