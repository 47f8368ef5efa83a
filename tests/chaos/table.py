"""The table of docs/reliability.md, made by `make chaos`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.endure import Outcome

PAGE = Path("docs/reliability.md")
BEGIN, END = "<!-- made by make chaos -->", "<!-- end -->"
HEAD = (
    "| fault | silence, s | first token, s | normal after, s | SLOs missed | moved | seed |",
    "|---|---|---|---|---|---|---|",
)


def row(outcome: Outcome) -> str:
    normal = "at once" if outcome.normal_s is None else f"{outcome.normal_s:.1f}"
    return (
        f"| {outcome.fault} | {outcome.silence_s:.2f} | {outcome.first_s:.2f} | {normal} "
        f"| {outcome.missed} of {outcome.judged} | {outcome.moved} | {outcome.seed} |"
    )


def write(tables: Mapping[str, Sequence[Outcome]]) -> None:
    """Put the tables in their place on the page."""
    text = PAGE.read_text()
    lines: list[str] = []
    for where, outcomes in tables.items():
        lines += ["", f"### {where.capitalize()}", "", *HEAD, *map(row, outcomes)]
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text("\n".join([before + BEGIN, *lines, "", END]) + after)
