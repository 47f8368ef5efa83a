"""The loads of the matrix at the rate at which slackline meets 90 %, beside all the others."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loadgen.markdown import table
from loadgen.results.experiment import Run
from loadgen.results.section import MISSING, Results, Section
from loadgen.results.slackline import capacities
from loadgen.results.slackline.same_loads import ROWS, load_of
from loadgen.results.slackline.systems import OTHERS, OURS, SEEDS, met_percent, percents, spread

VIOLATIONS = 0.1
BEST = 2  # of all with the first seed: these have the other seeds, too


def render(results: Results, duration_s: float) -> str:
    return table(
        ("load", "requests/s", "`slackline`", "the best of the ten", "", "points ahead"),
        [_row(results, name, duration_s / 3600) for name in capacities.TIGHT],
    )


def _row(results: Results, name: str, hours: float) -> Sequence[str]:
    # the search of capacities.py
    first = replace(load_of(name, 0.5 * hours), policy=OURS, seed=capacities.SEED)
    rate_rps = capacities.carried(results, VIOLATIONS, [first])
    if not rate_rps:
        return (name, MISSING, MISSING, MISSING, "", "")
    run = replace(load_of(name, hours), rate_rps=rate_rps)
    mine = percents(results, replace(run, policy=OURS), SEEDS)
    others: dict[str, tuple[str, Mapping[str, str]]] = {
        _shown(*each): each for each in (*ROWS[name][2], *OTHERS.items())
    }
    first_seed = replace(run, seed=SEEDS[0])
    tried = {shown: met_percent(results, _as(first_seed, *each)) for shown, each in others.items()}
    found = {shown: value for shown, value in tried.items() if value is not None}
    if len(found) < len(tried):
        return (name, f"{rate_rps:.3g}", spread(mine), MISSING, "", "")
    theirs = {
        shown: percents(results, _as(run, *others[shown]), SEEDS)
        for shown in sorted(found, key=lambda shown: -found[shown])[:BEST]
    }
    known = {shown: values for shown, values in theirs.items() if values is not None}
    if mine is None or len(known) < len(theirs):
        return (name, f"{rate_rps:.3g}", spread(mine), MISSING, "", "")
    best = max(known, key=lambda shown: sum(known[shown]))
    ahead = (sum(mine) - sum(known[best])) / len(SEEDS)
    return (
        name, f"{rate_rps:.3g}", spread(mine), spread(known[best]), f"`{best}`", f"{ahead:+.1f}",
    )  # fmt: skip


def _as(run: Run, policy: str, settings: Mapping[str, str]) -> Run:
    return replace(run, policy=policy, settings=dict(settings))


def _shown(policy: str, settings: Mapping[str, str]) -> str:
    words = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f"{policy}:{words}" if words else policy


SECTION = Section(
    name="slackline-at-90",
    title="The rate at which it keeps 90 %",
    paper=f"""\
The same loads, each at the rate at which `slackline` meets {100 * (1 - VIOLATIONS):g} % with seed
{capacities.SEED} ([Capacity](#capacity)). Beside it the best of all ten, each at its setting for
loads drawn at random, and of the policies of the table above at theirs: the {BEST} best of all with
seed {SEEDS[0]} have the other seeds, too. QoServe's loads are not here: for minutes they keep 98 %
at twice the rate of the matrix ([Overload](#overload)).""",
    hours=1.0,
    render=render,
    discussion="",
)
