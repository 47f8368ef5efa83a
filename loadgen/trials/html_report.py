"""Writes a report as one HTML file with its pictures inside: nothing is loaded from elsewhere."""

import re
from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

from loadgen.tables import plain_cells
from loadgen.trials.course_plots import Run, attainment_over_rate, burst, latencies
from loadgen.writing import write
from shared.rules.tiers import TierSet

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 24px auto; padding: 0 16px;
  color: #1b2130; background: #f4f5f7; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 26px 0 8px; }
p, pre { color: #556; margin: 4px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
section, figure { background: #fff; color: #1b2130; border: 1px solid #dfe2e8; border-radius: 8px;
  padding: 12px; margin: 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: right; padding: 3px 12px; white-space: pre; border-bottom: 1px solid #eceef2; }
th:first-child, td:first-child { text-align: left; }
@media (prefers-color-scheme: dark) {
  body { background: #10141c; color: #e7ebf3; } p, pre { color: #93a0b5; }
  figure { background: #e9ecf1; } section { background: #191f2a; color: inherit;
  border-color: #2b3342; } th, td { border-color: #2b3342; }
}
"""


def write_html(
    path: Path,
    *,
    title: str,
    facts: Sequence[str],
    tables: Sequence[Table],
    runs: Sequence[Run],
    tiers: TierSet,
    foot: Sequence[str],
) -> None:
    """Write the report of runs at one rate or several. Raises ConfigError if it cannot."""
    shown = [name for name in tiers.tiers if any(name in run.met for run in runs)]
    parts = [f"<section>{html_table(table)}</section>" for table in tables]
    if shown:
        parts += ["<h2>Attainment over rate</h2>", _svg(attainment_over_rate(runs, shown))]
    # at several rates: the latencies and the burst of the highest
    most = max((run.rate_rps for run in runs), default=0.0)
    top = [run for run in runs if run.course is not None and _highest(run, runs)]
    if top:
        at = f" at {most:g} requests/s" if len(runs) > len(top) else ""
        seen = [name for name in shown if any(name in _course(run) for run in top)]
        parts += [f"<h2>Latencies{at}</h2>", _svg(latencies(top, tiers, seen))]
        parts += [f"<h2>A burst{at}</h2>", _svg(burst(top))]
    elif runs:
        parts.append("<p>These reports have no latencies and no course: they are older.</p>")
    page = "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(fact)}</p>" for fact in facts),
            *parts,
            *(f"<p>{escape(line)}</p>" for line in foot),
            "</body></html>\n",
        ]
    )
    write(path, page.encode(), "--html")


def html_table(table: Table) -> str:
    """A table of a terminal as HTML; its texts are escaped."""
    headers, *rows = plain_cells(table)
    head = "".join(f"<th>{escape(text)}</th>" for text in headers)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows
    )
    title = f"<h2>{escape(str(table.title))}</h2>" if table.title else ""
    return f"{title}<table><tr>{head}</tr>{body}</table>"


def _highest(run: Run, runs: Sequence[Run]) -> bool:
    """Tells whether no run of the same label has a higher rate."""
    return all(run.rate_rps >= other.rate_rps for other in runs if other.label == run.label)


def _course(run: Run) -> dict[str, list[int]]:
    return run.course.offered if run.course else {}


def _svg(figure: Figure) -> str:
    """The figure as an element: its texts stay texts, so that it is small and can be searched."""
    out = StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = out.getvalue()
    # left out, as only a file of its own has them: the prologue, and the metadata with addresses
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return f"<figure>{text}</figure>"
