"""Hours of overload, as in QoServe's Table 4: slackline beside qoserve."""

from msgspec.structs import replace

from loadgen.results.section import Results, Section, table
from loadgen.results.slackline.same_loads import load_of
from loadgen.results.slackline.systems import OURS, met_percent

NAMES = ("QoServe, ShareGPT", "QoServe, code", "QoServe, conversations")
SYSTEMS = ((OURS, ""), ("qoserve", ""), ("qoserve", "0.008"))
SEED = 52


def render(results: Results, duration_s: float) -> str:
    rows = []
    for name in NAMES:
        run = replace(load_of(name, 1.0), duration_s=duration_s, seed=SEED)
        cells = []
        for policy, alpha in SYSTEMS:
            settings = {"alpha_low_s": alpha} if alpha else {}
            met = met_percent(results, replace(run, policy=policy, settings=settings))
            cells.append("not run" if met is None else f"{met:.1f}")
        rows.append((name, f"{run.rate_rps:g}", *cells))
    names = [f"`{name}:alpha_low_s={a}`" if a else f"`{name}`" for name, a in SYSTEMS]
    return table(("load", "requests/s", *names), rows)


SECTION = Section(
    name="slackline-hours",
    title="Overload that lasts for hours",
    paper=f"""\
Requests whose SLO was met, in %, on QoServe's loads at the rates of the first table, for four hours
of arrivals, with seed {SEED}: half as much again as QoServe carries for hours.""",
    hours=4.0,
    render=render,
    discussion="",
)
