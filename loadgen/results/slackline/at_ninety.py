"""The loads of the matrix at the rate at which slackline meets 90 %, beside all the others."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loadgen.markdown import table
from loadgen.results.experiment import Run
from loadgen.results.section import MISSING, Results, Section
from loadgen.results.slackline import capacities
from loadgen.results.slackline.same_loads import QOSERVE, ROWS, WORK, load_of
from loadgen.results.slackline.systems import OTHERS, OURS, SEEDS, percents, spread

VIOLATIONS = 0.1
# QoServe's loads last half an hour, so that TTLTs of minutes can be missed. They have 90 % at about
# so many times the rate of the matrix.
LONG_TIMES, LONG_FIRST = 6.0, 1.1
ON_QOSERVE = (WORK, QOSERVE, ("qoserve", {"alpha_low_s": "0.008"}))


def render(results: Results, duration_s: float) -> str:
    return table(
        ("load", "requests/s", "`slackline`", "the best of the ten", "", "points ahead"),
        [_row(results, name, duration_s / 3600) for name in ROWS],
    )


def _row(results: Results, name: str, hours: float) -> Sequence[str]:
    long = name.startswith("QoServe")
    run = load_of(name, hours * (LONG_TIMES if long else 1.0))
    # the search of capacities.py
    first = load_of(name, hours * (LONG_TIMES if long else 0.5), LONG_FIRST if long else 1.0)
    first = replace(first, policy=OURS, seed=capacities.SEED)
    rate_rps = capacities.carried(results, VIOLATIONS, [first])
    if not rate_rps:
        return (name, MISSING, MISSING, MISSING, "", "")
    run = replace(run, rate_rps=rate_rps)
    mine = percents(results, replace(run, policy=OURS), SEEDS)
    others: dict[str, tuple[str, Mapping[str, str]]] = {
        _shown(*each): each for each in (ON_QOSERVE if long else (*ROWS[name][2], *OTHERS.items()))
    }
    theirs = {shown: percents(results, _as(run, *each), SEEDS) for shown, each in others.items()}
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
{capacities.SEED} (Capacity). Beside it the best of all ten, each at its setting for loads drawn at
random, and of the policies of the table above at theirs. QoServe's loads last half an hour; beside
them are `slos_serve:long_deadlines=work` and `qoserve` at both of its settings.""",
    hours=1.0,
    render=render,
    discussion="",
)
