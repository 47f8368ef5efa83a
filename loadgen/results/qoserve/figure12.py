"""QoServe Figure 12: a load that swings between 2 and 5 requests/s, and two importances."""

from msgspec.structs import replace

from loadgen.lab.figures import Figures
from loadgen.results.experiment import Run
from loadgen.results.qoserve.systems import LABELS, POLICIES, ROUND_ROBIN
from loadgen.results.section import Results, Section, compare, table, violated_percent

LOW_RPS = 2.0
SWING = "900:1,900:2.5"  # every quarter of an hour: 2 requests/s, then 5
IMPORTANT = 0.8
# Violated in %: of all requests, of the important, of Q1, of Q2, of Q3.
PUBLISHED = {
    "fcfs": (81.88, 81.96, 97.13, 89.14, 59.57),
    "edf": (84.12, 84.09, 79.3, 83.27, 89.77),
    "qoserve": (8.64, 0.0, 16.03, 9.98, 0.0),
}


def render(results: Results, duration_s: float) -> str:
    rows = []
    for policy, published in PUBLISHED.items():
        # alpha follows the load
        settings = ROUND_ROBIN if policy == "qoserve" else POLICIES[policy]
        swinging = Run(
            policy=policy,
            settings=dict(settings),
            workload="azure-code",
            rate_rps=LOW_RPS,
            duration_s=duration_s,
        )
        figures = results.figures(replace(swinging, bursts=SWING, important=IMPORTANT))
        for (name, percent), value in zip(violations(figures).items(), published, strict=True):
            rows.append((LABELS[policy], name, *compare(value, percent, percent=True)))
    return table(("policy", "violated of", "published", "ours", "ratio", ""), rows)


def violations(figures: Figures | None) -> dict[str, float | None]:
    """The violated requests of each group in %."""
    if figures is None:
        return dict.fromkeys(("all", "the important", "Q1", "Q2", "Q3"))
    important = max(figures.by_importance, key=float)
    return {
        "all": violated_percent(figures),
        "the important": violated_percent(figures.by_importance[important]),
        **{tier: violated_percent(group) for tier, group in figures.by_tier.items()},
    }


SECTION = Section(
    name="figure12",
    title="Figure 12: transient overload",
    paper="""\
One replica; 2 and 5 requests/s in turn, 15 minutes each, over four hours; a random fifth of each
tier is unimportant. The paper does not name the workload: we take code. Alpha follows the load
(section 3.6).""",
    hours=4,
    render=render,
    discussion="""\
What differs: the mean load, 3.5 requests/s, is less than QoServe carries on this profile (Figure
7), and the deadlines of Q2 and Q3 can absorb a quarter of an hour above it.
""",
)
