"""The tables of docs/laboratory.md: a row is an experiment, beside what its paper printed."""

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from loadgen.lab.papers.run import Run
from loadgen.lab.papers.search import Job, Lookup
from loadgen.lab.papers.values import Found, Results, Value
from loadgen.markdown import table

MISSING = "not run"
CLOSE = 0.15  # relative difference within which a figure counts as reproduced
CLOSE_POINTS = 0.5  # for percentages also this difference, in points


class Row(NamedTuple):
    """`name` is the figure, table or load, as `--only` takes it. `published` runs along `values`;
    an empty value is an empty cell.
    """

    name: str
    what: str
    values: Sequence[Value | None]
    published: Sequence[float | None] = ()


class Table(NamedTuple):
    """`forms` has the format of each value, or of all. `percent`: the values are percentages."""

    name: str
    headers: Sequence[str]
    rows: Sequence[Row]
    forms: Sequence[str] = (".3g",)
    percent: bool = False

    def of(self, names: Collection[str]) -> "Table":
        """The table with the rows of these names only, or with all rows if it is named itself."""
        if self.name in names:
            return self
        return self._replace(rows=[row for row in self.rows if row.name in names])

    def jobs(self, lookup: Lookup, hours: float | None = None) -> Sequence[Job]:
        """The jobs of the rows. A run at a rate to be searched is included once that is found."""
        results = Results(lookup, hours)
        for row in self.rows:
            _evaluated(row, results)
        return results.requested


def _evaluated(row: Row, results: Results) -> list[Found | None]:
    return [None if value is None else value(results) for value in row.values]


def render(of: Table, results: Results) -> tuple[str, list[dict[str, Any]]]:
    """The table in Markdown with a line about its runs, and its values by seed."""
    lines, records = [], []
    for row in of.rows:
        found, cells = _evaluated(row, results), []
        for n, one in enumerate(found):
            form = of.forms[n % len(of.forms)]
            printed = row.published[n] if row.published else None
            empty = row.values[n] is None
            cells.append("" if empty else _cell(one, form, printed, percent=of.percent))
        lines.append((row.name, row.what, *cells) if row.what else (row.name, *cells))
        each = [None if one is None else [round(value, 4) for value in one.each] for one in found]
        records.append({"row": [row.name, row.what], "by_seed": each})
    return f"{table(of.headers, lines)}\n\n{_facts(results)}", records


def _cell(found: Found | None, form: str, printed: float | None, *, percent: bool) -> str:
    """Our value, with the published one in brackets; bold where the two are far apart."""
    shown = MISSING if found is None else figure(found.mean, form)
    if found is not None and found.label:
        shown += f" `{found.label}`"
    if printed is None:
        return shown
    if found is not None and not reproduced(found.mean, printed, percent=percent):
        shown = f"**{shown}**"
    return f"{shown} ({printed:g})"


def figure(value: float, form: str) -> str:
    return f"{value:.0f}" if form == ".3g" and abs(value) >= 999.5 else f"{value:{form}}"


def reproduced(ours: float, published: float, *, percent: bool = False) -> bool:
    """True within 15 % of the published value, for a percentage also within half a point."""
    apart = abs(ours - published)
    return apart <= CLOSE * abs(published) + 1e-9 or (percent and apart <= CLOSE_POINTS)


def _facts(results: Results) -> str:
    """The seeds, the lengths and the last day of the runs."""
    runs = [job if isinstance(job, Run) else job.run for job in results.requested]
    seeds = sorted({run.seed for run in runs})
    many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 6 else ", ".join(map(str, seeds))
    hours = sorted({run.duration_s / 3600 for run in runs})
    length = " to ".join(dict.fromkeys(f"{h:.2g}" for h in (hours[0], hours[-1])))
    days = sorted({result.on for result in results.used})
    return f"Seed {many}; {length} h; {days[-1] if days else MISSING}."


def replaced(page: str, name: str, text: str) -> str:
    """The page with this text between the markers of the table."""
    begin, end = f"<!-- table {name} -->", "<!-- end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", page, count=1)


def present(page: str, name: str) -> str:
    """The text between the markers of the table."""
    after = page.partition(f"<!-- table {name} -->")[2]
    return after.partition("<!-- end -->")[0].strip()
