"""Writes the table of results of `make chaos`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.endure import Outcome

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


def write(tables: Mapping[str, Sequence[Outcome]], file: Path) -> None:
    lines: list[str] = []
    for where, outcomes in tables.items():
        lines += [f"### {where.capitalize()}", "", *HEAD, *map(row, outcomes), ""]
    file.write_text("\n".join(lines))
