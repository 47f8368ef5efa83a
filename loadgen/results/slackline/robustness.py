"""Loads and replicas that are not what the policies take them for."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loadgen.markdown import table
from loadgen.results.section import Results, Section
from loadgen.results.slackline.same_loads import load_of
from loadgen.results.slackline.systems import OURS, mean_percent, other, percents, spread

# Each at a part of its rate, so that there is something to lose.
NAMES: Mapping[str, float] = {
    "QoServe, ShareGPT": 1.0,
    "SLOs-Serve, Coder": 0.9,
    "SLOs-Serve, Mixed": 0.9,
    "Ascendra": 0.9,
}
RIVALS = ("qoserve", "slos_serve")
SEEDS = (32, 61, 62)
CASES: Mapping[str, Mapping[str, Any]] = {
    "as predicted": {},
    "outputs half as long as lately": {"length_times": 2.0},
    "outputs twice as long as lately": {"length_times": 0.5},
    "engines 15 % faster than their profile": {"engine_times": 0.85},
    "engines 15 % slower than their profile": {"engine_times": 1.15},
    "arrivals in bursts (Gamma, CV 3)": {"arrivals": "gamma:3"},
}


def render(results: Results, duration_s: float) -> str:
    rows = []
    for name, times in NAMES.items():
        for case, changes in CASES.items():
            run = replace(load_of(name, duration_s / 3600, times), **changes)
            ours = spread(percents(results, replace(run, policy=OURS), SEEDS))
            theirs = (mean_percent(results, other(run, rival), SEEDS) for rival in RIVALS)
            rows.append((f"{name} x {times:g}", case, ours, *theirs))
    head = ("load", "what is different", f"`{OURS}`", *(f"`{rival}`" for rival in RIVALS))
    return table(head, rows)


SECTION = Section(
    name="slackline-robustness",
    title="What is misjudged",
    paper=f"""\
Requests whose SLO was met, in %: the mean of {len(SEEDS)} seeds, of `slackline` with the least and
the most of them. Policies learn output lengths from the requests
that end; here they see them twice or half as long as they were. Engines take so much more or less
than the profile says; the planner corrects its predictions as it sees them.""",
    hours=0.5,
    render=render,
    discussion="""\
Misjudged output lengths cost nothing to 0.1 points: the policy uses them for whole answers, and to
reckon what a pace serves. Engines that are 15 % slower than their profile cost `slackline` up to
4.5 points, and `slos_serve` 4.6 to 11.0. Bursts cost most: 15.1 points of Mixed, 11.2 of Ascendra's
and 5.1 of Coder. It is ahead of both others in all rows but one: on Mixed with faster engines it is
level with `slos_serve`.
""",
)
