"""Ascendra Figure 11: the order on LP and elastic batches on HP."""

from msgspec.structs import replace

from loadgen.lab.papers.ascendra import systems as runs
from loadgen.lab.papers.section import Results, Section, figure
from loadgen.markdown import table

HIGH_RPS = 10.0
VARIANTS: dict[str, dict[str, str]] = {
    "EDF, elastic batches": {},
    "SJF on LP": {"value": "sjf"},
    "batches of 128 on HP": {"elastic": "false"},
}


def render(results: Results, duration_s: float) -> str:
    rows = []
    for name, settings in VARIANTS.items():
        run = runs.run("ascendra", duration_s, **settings)
        goodput = runs.goodput_rps(results, run)
        attained = runs.attained_percent(results.figures(replace(run, rate_rps=HIGH_RPS)))
        rows.append((name, figure(goodput), figure(attained, percent=True)))
    return table(("", "goodput, requests/s", f"attained at {HIGH_RPS:g} requests/s"), rows)


SECTION = Section(
    name="ascendra-ablation",
    title="Figure 11: order and elastic batches",
    paper="""\
With EDF as the value function of LP goodput is higher than with SJF, and elastic batches on HP add
to it at high rates.""",
    hours=runs.HOURS,
    render=render,
    discussion="""\
What comes out: neither matters here. All requests have the same TTFT, so EDF on LP is the order of
arrival, and under either order a request that would be late goes to HP. Batches of 128 on HP are as
good as elastic ones, since KV is never short: 16 GB of weights leave room for 427,000 tokens.
""",
)
