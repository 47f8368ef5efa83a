"""The loads of the matrix again, at the rate that slackline just carries."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loadgen.results.job import Search
from loadgen.results.matrix.loads import LOADS
from loadgen.results.section import MISSING, Results, Section, table
from loadgen.results.slackline.same_loads import ROWS, load_of
from loadgen.results.slackline.systems import OTHERS, OURS, SEEDS, percents, spread

VIOLATIONS, PRECISION, STEP = 0.1, 0.04, 1.15
SEED = 35  # of the search
# Beside the policies of the first table, those that are nearest on other loads.
NEAR = ("edf", "srpf", "qoserve", "slos_serve")
# Of the rate of the matrix, the one that is tried first.
FIRST = {name: 2.0 if name.startswith("QoServe") else 1.0 for name in ROWS}


def render(results: Results, duration_s: float) -> str:
    head = ("load", "requests/s", f"`{OURS}`", "the best of the others", "", "points ahead", "next")
    return table(head, [_row(results, load.name, duration_s / 3600) for load in LOADS])


def _row(results: Results, name: str, times: float) -> Sequence[str]:
    tried = replace(load_of(name, times, FIRST[name]), policy=OURS, seed=SEED)
    found = results.capacity(
        Search(run=tried, violations=VIOLATIONS, precision=PRECISION, step=STEP)
    )
    if found is None:
        return (name, MISSING, "", "", "", "", "")
    run = replace(tried, rate_rps=found.rate_rps)
    mine = percents(results, run, SEEDS)
    theirs = {
        _shown(rival, settings): percents(
            results, replace(run, policy=rival, settings=dict(settings)), SEEDS
        )
        for rival, settings in _rivals(name)
    }
    known = {rival: values for rival, values in theirs.items() if values is not None}
    if mine is None or len(known) < len(theirs):
        return (name, f"{run.rate_rps:g}", spread(mine), MISSING, "", "", "")
    best, second, *_ = sorted(known, key=lambda rival: -sum(known[rival]))
    ahead = (sum(mine) - sum(known[best])) / len(SEEDS)
    after = f"`{second}` {sum(known[second]) / len(SEEDS):.1f}"
    rate = f"{run.rate_rps:g}"
    return (name, rate, spread(mine), spread(known[best]), f"`{best}`", f"{ahead:+.1f}", after)


def _rivals(name: str) -> Sequence[tuple[str, Mapping[str, str]]]:
    """Those that are near at the setting that suits most loads, and those of the first table."""
    rivals = [(policy, OTHERS[policy]) for policy in NEAR]
    return rivals + [rival for rival in ROWS[name][2] if rival not in rivals]


def _shown(policy: str, settings: Mapping[str, str]) -> str:
    return ":".join((policy, *(f"{key}={value}" for key, value in settings.items())))


SECTION = Section(
    name="slackline-own-rates",
    title="The same loads, at the rate that slackline carries",
    paper=f"""\
The same as above at another rate: the highest at which `slackline` meets 90 % with seed {SEED},
within {100 * PRECISION:g} %. Beside it the policies of that table, and the four that come nearest
on other loads at the setting that suits most. Last, the second best of them.""",
    hours=1.0,
    render=render,
    discussion="",
)
