"""QoServe's loads beyond capacity for longer, beside QoServe."""

from collections.abc import Sequence

from msgspec.structs import replace

from loadgen.results.experiment import Run
from loadgen.results.matrix.loads import LOADS
from loadgen.results.section import MISSING, Results, Section, table
from loadgen.results.slackline.rows import QOSERVE, ROWS
from loadgen.results.slackline.systems import OURS, SEEDS, met_percent

LENGTHS_H = (0.25, 0.5)


def render(results: Results, duration_s: float) -> str:
    rows = []
    for load in LOADS:
        if not load.figure7:
            continue
        for hours in LENGTHS_H:
            run = replace(
                load.run,
                rate_rps=ROWS[load.name][0],
                duration_s=hours * duration_s,
                seed=SEEDS[0],
            )
            rows.append((load.name, f"{60 * hours:g} minutes", *_cells(results, run)))
    return table(("load", "arrivals", "`slackline`", "`qoserve`", "points ahead"), rows)


def _cells(results: Results, run: Run) -> Sequence[str]:
    mine = met_percent(results, replace(run, policy=OURS))
    theirs = met_percent(results, replace(run, policy=QOSERVE[0], settings=QOSERVE[1]))
    if mine is None or theirs is None:
        return MISSING, MISSING, ""
    return f"{mine:.1f}", f"{theirs:.1f}", f"{mine - theirs:+.1f}"


SECTION = Section(
    name="slackline-hours",
    title="Overload that lasts",
    paper="""\
QoServe's loads at 1.5 times its capacity, for longer. Requests whose SLO was met, in %.""",
    hours=1.0,
    render=render,
    discussion="",
)
