"""The cost of control latency near the limit of each policy. The paper has no such table."""

from msgspec.structs import replace

from loadgen.lab.papers.qoserve.systems import LABELS, run
from loadgen.lab.papers.section import Results, Section, figure, violated_percent
from loadgen.markdown import table

# Requests/s of the code workload, a little below the goodput of each policy (Figure 7).
RATES_RPS = {"fcfs": 2.0, "edf": 2.6, "qoserve": 3.7}
LATENCIES = ("none", "live")
GROUPS = ("all", "Q1", "Q2", "Q3")


def render(results: Results, duration_s: float) -> str:
    rows = []
    for policy, rate_rps in RATES_RPS.items():
        for latency in LATENCIES:
            figures = results.figures(
                replace(run(policy, "azure-code", rate_rps, duration_s), latency=latency)
            )
            cells = [
                figure(violated_percent(group), percent=True)
                for group in (figures, *(figures.by_tier.values() if figures else [None] * 3))
            ]
            p99 = figure(None if figures is None else figures.by_tier["Q1"].ttft_s.p99)
            rows.append((LABELS[policy], figure(rate_rps), latency, *cells, p99))
    return table(
        (
            "policy",
            "requests/s",
            "latency",
            *(f"violated of {group}" for group in GROUPS),
            "TTFT p99 of Q1, s",
        ),
        rows,
    )


SECTION = Section(
    name="latency",
    title="Control latency",
    paper="""\
The tables above take a decision to have effect at once, as the papers do. Here each policy serves
the code workload a little below its limit, first so and then with the control latency of a live
fleet ([simulator.md](simulator.md)).""",
    hours=1,
    render=render,
    discussion="",
)
