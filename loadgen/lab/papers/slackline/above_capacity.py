"""More than the replicas carry: slackline beside three others and the bound."""

from collections.abc import Mapping

from msgspec.structs import replace

from loadgen.lab.papers.experiment import BOUND, Run
from loadgen.lab.papers.section import Results, Section
from loadgen.lab.papers.slackline.same_loads import load_of
from loadgen.lab.papers.slackline.systems import (
    FIXED_CHUNK,
    OTHERS,
    OURS,
    percents,
    percents_by_importance,
    spread,
)
from loadgen.markdown import table

# Each with the setting of `qoserve` that suits it better.
LOADS: Mapping[str, Mapping[str, str]] = {
    "QoServe, code": OTHERS["qoserve"],
    "QoServe, ShareGPT": OTHERS["qoserve"],
    "SLOs-Serve, ChatBot": FIXED_CHUNK,
    "SLOs-Serve, Mixed": FIXED_CHUNK,
}
TIMES = (1.1, 1.5, 2.0)
RIVALS = ("qoserve", "slos_serve", "edf")
IMPORTANT = 0.2
SEEDS = (31, 61, 62)


def render(results: Results, duration_s: float) -> str:
    rows = []
    for name, qoserve in LOADS.items():
        for times in TIMES:
            run = load_of(name, duration_s / 3600, times)
            rows.append((name, f"{times:g}", f"{run.rate_rps:g}", *_cells(results, run, qoserve)))
    head = ("load", "times", "requests/s", f"`{OURS}`", *(f"`{rival}`" for rival in RIVALS))
    return table((*head, "bound", f"`{OURS}`: important", "others"), rows)


def _cells(results: Results, run: Run, qoserve: Mapping[str, str]) -> list[str]:
    """`qoserve`: its settings."""
    cells = [spread(percents(results, replace(run, policy=OURS), SEEDS))]
    for rival in RIVALS:
        settings = qoserve if rival == "qoserve" else OTHERS[rival]
        theirs = replace(run, policy=rival, settings=dict(settings))
        cells.append(spread(percents(results, theirs, SEEDS)))
    bounds = [results.bound(replace(run, policy=BOUND, seed=seed)) for seed in SEEDS]
    met = [100 * (1 - bound.violated_fraction) for bound in bounds if bound is not None]
    cells.append(spread(met if len(met) == len(SEEDS) else None))
    unequal = replace(run, policy=OURS, important=IMPORTANT)
    parts = percents_by_importance(results, unequal, SEEDS) or (None, None)
    return cells + [spread(part) for part in parts]


SECTION = Section(
    name="slackline-overload",
    title="Overload",
    paper=f"""\
Requests whose SLO was met, in %: the mean of {len(SEEDS)} seeds, with the least and the most of
them. Once the rate is that above: overload for QoServe's loads, and just less than the replicas
carry of the others. `qoserve` has chunks of fixed length on ChatBot and Mixed, which suits it
better there. The bound is what no scheduler without a draft model can exceed
([bound.md](bound.md)). In the last two columns {100 * IMPORTANT:.0f} % of the requests are
important. These are four of the twelve loads: two in which work piles up, and two of paces, of
which Mixed has several. Nobody has tried the other eight above capacity.""",
    hours=0.5,
    render=render,
    discussion="""\
At every rate `slackline` is ahead of all three others in the mean. On ChatBot and Mixed its least
is above the most of each of them, but for `slos_serve` on ChatBot at 1.1 times the rate. It was to
come within three points of the bound. On QoServe's loads it does (2.4 at most). On ChatBot and
Mixed it is 7 to 25 points from it. There the bound says little below twice the rate, where it is
97.5 to 100 %; and it knows which requests will come and how long each output is.
[Below](#overload-for-half-an-hour) are longer runs.

Of the important requests 96 to 100 % are kept at every rate in the mean (93.2 with the worst
seed), and of QoServe's all but a few at twice the rate. On ChatBot and Mixed not all are kept: a
request that has begun to decode gives up KV for a more important prompt, but not its time.
""",
)
