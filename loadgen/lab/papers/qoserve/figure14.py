"""QoServe Figure 14: alpha, the weight of the remaining work in the priority."""

from loadgen.lab.papers.qoserve.systems import run
from loadgen.lab.papers.section import MISSING, Results, Section, figure, violated_percent
from loadgen.markdown import table
from loadgen.trials.figures import Figures

RATES_RPS = (2.0, 4.0, 6.0)  # of those of Figure 10: its runs are QoServe's with 8 ms a token
# Seconds per token: deadline order, and the two values of section 3.6. The three of the figure are
# in its legend alone.
ALPHAS_S = ("0", "0.001", "0.008")
LATE_PERCENT = 50.0  # "most" long requests


def render(results: Results, duration_s: float) -> str:
    by_run = {
        (rate_rps, alpha_s): results.figures(
            run(
                "qoserve",
                "azure-code",
                rate_rps,
                duration_s,
                alpha_low_s=alpha_s,
                alpha_high_s=alpha_s,
            )
        )
        for rate_rps in RATES_RPS
        for alpha_s in ALPHAS_S
    }
    rows = [
        (
            f"{rate_rps:g}",
            f"{1000 * float(alpha_s):g}",
            *(
                figure(None if figures is None else figures.by_tier[tier].ttft_s.p50)
                for tier in ("Q1", "Q2", "Q3")
            ),
            figure(violated_percent(figures), percent=True),
            figure(long_percent(figures), percent=True),
        )
        for (rate_rps, alpha_s), figures in by_run.items()
    ]
    return "\n\n".join(
        (
            table(
                (
                    "requests/s",
                    "alpha, ms a token",
                    *(f"median TTFT of {tier}, s" for tier in ("Q1", "Q2", "Q3")),
                    "violated",
                    "violated of the long",
                ),
                rows,
            ),
            table(("claim", "here"), claims(by_run)),
        )
    )


def long_percent(figures: Figures | None) -> float | None:
    return None if figures is None else violated_percent(figures.by_length["long"])


def median_s(figures: Figures | None) -> float:
    """The mean of the tiers' median TTFT."""
    if figures is None:
        return 0.0
    return sum(group.ttft_s.p50 or 0.0 for group in figures.by_tier.values()) / 3


def claims(by_run: dict[tuple[float, str], Figures | None]) -> list[tuple[str, str]]:
    """(claim, verdict) of section 4.4.1."""
    low, high = RATES_RPS[0], RATES_RPS[-1]
    *_, small, large = ALPHAS_S

    def verdict(rate_rps: float, holds: bool) -> str:
        known = all(by_run[rate_rps, alpha_s] is not None for alpha_s in ALPHAS_S)
        return MISSING if not known else "holds" if holds else "does not hold"

    medians = [median_s(by_run[high, alpha_s]) for alpha_s in ALPHAS_S]
    lates = [long_percent(by_run[high, alpha_s]) or 0.0 for alpha_s in ALPHAS_S]
    apart = abs(
        (violated_percent(by_run[low, small]) or 0.0)
        - (violated_percent(by_run[low, large]) or 0.0)
    )
    return [
        (
            "At the highest load a larger alpha lowers the median latency",
            verdict(high, medians == sorted(medians, reverse=True)),
        ),
        (
            "At the highest load the largest alpha violates most long requests",
            verdict(high, lates[-1] > LATE_PERCENT),
        ),
        (
            "At the lowest load 1 ms a token violates as few as 8 (within half a point)",
            verdict(low, apart <= 0.5),
        ),
    ]


SECTION = Section(
    name="figure14",
    title="Figure 14: alpha",
    paper="""\
One replica; the load varies, and the figure shows the median latency and the violations for three
values of alpha. It is published as curves only. We take the code workload and three loads of
Figure 10, with alpha 0 (deadline order), 1 and 8 ms a token (section 3.6).""",
    hours=2,
    render=render,
    discussion="""\
What differs: the legend of the figure has its three values of alpha, the text does not. Already
half an hour at 6 requests/s shows both sides of alpha: 0, 1 and 8 ms a token violate 2.7, 1.9 and
1.0 % of all requests, but 3.9, 5.1 and 7.3 % of the long ones.
""",
)
