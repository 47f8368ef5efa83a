"""Fleets of one to 64 replicas, other GPUs and models, with and without a draft model."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.section import Results, Section
from loadgen.lab.papers.slackline.same_loads import load_of
from loadgen.lab.papers.slackline.systems import OURS, other, percents, spread
from loadgen.markdown import table

NAMES = ("SLOs-Serve, ChatBot", "QoServe, ShareGPT")
RIVALS = ("qoserve", "slos_serve")
SEEDS = (34, 61, 62)
REPLICAS = (1, 2, 4, 16, 64)
# Of each profile so many times the rate of an A100 with the 8B model, roughly.
PROFILES: Mapping[str, float] = {
    "h100-llama3-8b": 2.0,
    "a100-llama3-70b-tp4": 0.35,
    "h100-llama3-70b-tp4": 0.7,
}
REQUESTS = 2000  # of each run, at most


def render(results: Results, duration_s: float) -> str:
    rows = []
    for name in NAMES:
        load = load_of(name, duration_s / 3600)
        for label, rate_rps, changes in _fleets(load):
            # large fleets serve as many requests in less time, but in no less than fills them
            seconds = max(min(load.duration_s, REQUESTS / rate_rps), 20.0)
            run = replace(load, rate_rps=rate_rps, duration_s=seconds, **changes)
            ours = spread(percents(results, replace(run, policy=OURS), SEEDS))
            theirs = (spread(percents(results, other(run, rival), SEEDS)) for rival in RIVALS)
            rows.append((name, label, f"{rate_rps:g}", ours, *theirs))
    head = ("load", "fleet", "requests/s", f"`{OURS}`", *(f"`{rival}`" for rival in RIVALS))
    return table(head, rows)


def _fleets(load: Run) -> list[tuple[str, float, dict[str, Any]]]:
    """Label, rate, and what differs from two A100s."""
    rate_rps, each = load.rate_rps, load.rate_rps / 2
    fleets: list[tuple[str, float, dict[str, Any]]] = [
        (f"{count} x A100", _rounded(each * count), {"replicas": count}) for count in REPLICAS
    ]
    if load.draft:
        fleets.append(("2 x A100, without a draft model", rate_rps, {"draft": 0.0}))
    fleets += [
        (f"2 x `{profile}`", _rounded(rate_rps * times), {"profile": profile})
        for profile, times in PROFILES.items()
    ]
    return fleets


def _rounded(rate_rps: float) -> float:
    return float(f"{rate_rps:.3g}")


SECTION = Section(
    name="slackline-fleets",
    title="Other fleets",
    paper=f"""\
Requests whose SLO was met, in %: the mean of {len(SEEDS)} seeds, with the least and the most of
them. Rates are those above for each replica, times a rough ratio of the GPUs. Runs of more than two
replicas last from 20 s, so that few of their requests meet a fleet that has been full for long.""",
    hours=0.5,
    render=render,
    discussion="""\
With the same load for each, more replicas keep more of ChatBot, from 95.6 % with one to nearly
all with sixteen, and as much of ShareGPT to 0.1 points. `slackline` is first or level, to 0.1
points, in all rows in the mean. With one and two A100s the seeds of ChatBot differ by more than it
and `slos_serve` do, and their brackets overlap.
""",
)
