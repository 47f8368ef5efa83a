"""QoServe Figures 10 and 11: latency and violations over the load, by tier and by length."""

from typing import Literal

from loadgen.lab.papers.qoserve.systems import LABELS, run
from loadgen.lab.papers.section import Results, Section, figure, latency_s, violated_percent
from loadgen.markdown import table
from loadgen.trials.figures import Figures

RATES_RPS = (2.0, 3.0, 4.0, 5.0, 6.0)
POLICIES = ("fcfs", "edf", "srpf", "qoserve")
TIERS = ("Q1", "Q2", "Q3")
PERCENTILES: tuple[Literal["p50", "p95"], ...] = ("p50", "p95")


def render(results: Results, duration_s: float) -> str:
    figures = {
        (policy, rate): results.figures(run(policy, "azure-code", rate, duration_s))
        for rate in RATES_RPS
        for policy in POLICIES
    }
    latency, violations = [], []
    for (policy, rate), run_figures in figures.items():
        name = (f"{rate:g}", LABELS[policy])
        tiers = {tier: None if run_figures is None else run_figures.by_tier[tier] for tier in TIERS}
        seconds = [
            latency_s(tier, group, percentile)
            for percentile in PERCENTILES
            for tier, group in tiers.items()
        ]
        latency.append((*name, *map(figure, seconds)))
        lengths = [
            None if run_figures is None else run_figures.by_length[length]
            for length in ("short", "long")
        ]
        violations.append(
            (
                *name,
                *(
                    figure(violated_percent(group), percent=True)
                    for group in (run_figures, *lengths, *tiers.values())
                ),
            )
        )
    return "\n\n".join(
        (
            "Figure 10, seconds (TTFT of Q1, TTLT of Q2 and Q3):",
            table(
                ("requests/s", "policy", *(f"{p} {tier}" for p in PERCENTILES for tier in TIERS)),
                latency,
            ),
            (
                "Figure 11, violated of the requests offered "
                "(long: the prompt is at or beyond the 90th percentile):"
            ),
            table(("requests/s", "policy", "all", "short", "long", *TIERS), violations),
            "The paper's claims:",
            table(("claim", "here"), claims(figures)),
        )
    )


def claims(by_run: dict[tuple[str, float], Figures | None]) -> list[tuple[str, str]]:
    """(claim, verdict). A verdict needs the runs of all policies at its rate."""

    def verdict(*needed: Figures | None, holds: bool) -> str:
        return "not run" if None in needed else "holds" if holds else "does not hold"

    def violated(policy: str, rate: float, length: str | None = None) -> float:
        figures = by_run[policy, rate]
        if figures is None:
            return 0.0
        return (figures if length is None else figures.by_length[length]).violated_fraction

    low, high = RATES_RPS[0], RATES_RPS[-1]
    others = [policy for policy in POLICIES if policy != "qoserve"]
    at_low = [by_run[policy, low] for policy in POLICIES]
    at_high = [by_run[policy, high] for policy in POLICIES]
    return [
        (
            "At the highest load QoServe has the fewest violations",
            verdict(
                *at_high,
                holds=all(violated("qoserve", high) < violated(policy, high) for policy in others),
            ),
        ),
        (
            "SRPF violates long requests even at low load, where the others violate none",
            verdict(
                *at_low,
                holds=violated("srpf", low, "long") > 0
                and max(violated(policy, low) for policy in ("edf", "qoserve")) == 0,
            ),
        ),
        (
            (
                "FCFS and EDF violate short and long requests alike at the highest load "
                "(within 10 points)"
            ),
            verdict(
                *at_high,
                holds=all(
                    abs(violated(policy, high, "long") - violated(policy, high, "short")) < 0.1
                    for policy in ("fcfs", "edf")
                ),
            ),
        ),
        (
            "SRPF gives up nearly all long requests at the highest load (over 90 %)",
            verdict(*at_high, holds=violated("srpf", high, "long") > 0.9),
        ),
    ]


SECTION = Section(
    name="figure10",
    title="Figures 10 and 11: latency and violations over the load",
    paper="""\
One replica, the code workload, chunks of 256 tokens for the baselines. The figures are published as
curves only.""",
    hours=2,
    render=render,
    discussion="""\
What differs: the artifact calls prompts of more than 6,200 tokens long, which is about the 90th
percentile.
""",
)
