"""More than the replicas carry: slackline beside three others and the bound."""

from msgspec.structs import replace

from loadgen.markdown import table
from loadgen.results.experiment import BOUND
from loadgen.results.section import MISSING, Results, Section
from loadgen.results.slackline.same_loads import load_of
from loadgen.results.slackline.systems import OURS, met_percent, other, percents_by_importance

NAMES = ("QoServe, code", "QoServe, ShareGPT", "SLOs-Serve, ChatBot", "SLOs-Serve, Mixed")
TIMES = (1.1, 1.5, 2.0)
RIVALS = ("qoserve", "slos_serve", "edf")
IMPORTANT = 0.2
SEED = 31


def render(results: Results, duration_s: float) -> str:
    rows = []
    for name in NAMES:
        for times in TIMES:
            run = replace(load_of(name, duration_s / 3600, times), seed=SEED)
            cells = [met_percent(results, replace(run, policy=OURS))]
            cells += [met_percent(results, other(run, rival)) for rival in RIVALS]
            bound = results.bound(replace(run, policy=BOUND))
            cells.append(None if bound is None else 100 * (1 - bound.violated_fraction))
            unequal = replace(run, policy=OURS, important=IMPORTANT)
            cells += percents_by_importance(results, unequal, (SEED,)) or (None, None)
            shown = (MISSING if cell is None else f"{cell:.1f}" for cell in cells)
            rows.append((name, f"{times:g}", f"{run.rate_rps:g}", *shown))
    head = ("load", "times", "requests/s", f"`{OURS}`", *(f"`{rival}`" for rival in RIVALS))
    return table((*head, "bound", f"`{OURS}`: important", "others"), rows)


SECTION = Section(
    name="slackline-overload",
    title="Overload",
    paper=f"""\
Requests whose SLO was met, in %, with seed {SEED}. Once the rate is that above: overload for
QoServe's loads, and just less than the replicas carry of the others. The bound is what no scheduler
without a draft model can exceed ([bound.md](bound.md)). In the last two columns
{100 * IMPORTANT:.0f} % of the requests are important.""",
    hours=0.5,
    render=render,
    discussion="""\
At no rate is `slackline` more than 0.2 points behind any of the three others. On QoServe's loads it
is within 1.9 points of the bound. On ChatBot and Mixed it is 7 to 25 points from it; the bound,
which knows the future, falls below 98 % only at twice the rate. These runs last minutes;
[slackline.md](slackline.md) has half an hour.

Of the important requests 97 to 100 % are kept at every rate, and all of QoServe's. It is not all on
ChatBot and Mixed: a request that has begun to decode gives up KV for a more important prompt, but
not its time.
""",
)
