"""Not a table of the paper: what the latency of control costs, near each policy's limit."""

from msgspec.structs import replace

from loadgen.results.qoserve.systems import LABELS, run
from loadgen.results.section import Lab, Section, figure, table, violated_percent

# Requests/s of the code workload, a little below what each carries (Figure 7).
RATES_RPS = {"fcfs": 2.0, "edf": 2.6, "qoserve": 3.7}
LATENCIES = ("none", "live")
GROUPS = ("all", "Q1", "Q2", "Q3")


def body(lab: Lab, duration_s: float) -> str:
    rows = []
    for policy, rate_rps in RATES_RPS.items():
        for latency in LATENCIES:
            made = lab.figures(
                replace(run(policy, "azure-code", rate_rps, duration_s), latency=latency)
            )
            cells = [
                figure(violated_percent(group), percent=True)
                for group in (made, *(made.by_tier.values() if made else [None] * 3))
            ]
            p99 = figure(None if made is None else made.by_tier["Q1"].ttft_s.p99)
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
    title="Control that takes time",
    paper="The tables above are in the papers' world, where a decision takes effect at once. Here each policy serves the code workload a "
    "little below its limit, so and with what control takes in a live fleet (simulator.md).",
    hours=1,
    body=body,
    notes="",
)
