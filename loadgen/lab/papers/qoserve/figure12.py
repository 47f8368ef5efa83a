"""QoServe Figures 12 and 13: a load that swings between 2 and 5 requests/s, and two importances."""

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run, RunResult
from loadgen.lab.papers.latency_windows import Windows
from loadgen.lab.papers.qoserve.systems import LABELS, POLICIES, ROUND_ROBIN
from loadgen.lab.papers.section import MISSING, Results, Section, compare, figure, violated_percent
from loadgen.markdown import table
from loadgen.trials.figures import Figures
from shared.rules.tiers import QOSERVE_3

LOW_RPS = 2.0
PHASE_S = 900
SWING = f"{PHASE_S}:1,{PHASE_S}:2.5"  # every quarter of an hour: 2 requests/s, then 5
IMPORTANT = 0.8
WINDOW_S = 60.0
# Violated in %: of all requests, of the important, of Q1, of Q2, of Q3.
PUBLISHED = {
    "fcfs": (81.88, 81.96, 97.13, 89.14, 59.57),
    "edf": (84.12, 84.09, 79.3, 83.27, 89.77),
    "qoserve": (8.64, 0.0, 16.03, 9.98, 0.0),
}
# The longest latency of a request in seconds: relegated by QoServe, and in the baselines.
LONGEST_S = {"qoserve": 3900.0, "fcfs": 5582.0, "edf": 5582.0}


def render(results: Results, duration_s: float) -> str:
    found = {policy: results.result(swinging(policy, duration_s)) for policy in PUBLISHED}
    rows = []
    for policy, published in PUBLISHED.items():
        result = found[policy]
        percents = violations(None if result is None else result.figures)
        for (name, percent), value in zip(percents.items(), published, strict=True):
            rows.append((LABELS[policy], name, *compare(value, percent, percent=True)))
    windows = {policy: windows_of(result) for policy, result in found.items()}
    longest = [
        (LABELS[policy], *compare(published, None if seen is None else seen.longest_s))
        for policy, published in LONGEST_S.items()
        for seen in (windows[policy],)
    ]
    phases = max(1, round(duration_s / PHASE_S))
    return "\n\n".join(
        (
            table(("policy", "violated of", "published", "ours", "ratio", ""), rows),
            (
                "Figure 13: the p99 of the important requests that arrived in each minute, "
                "averaged over each quarter of an hour, in seconds (TTFT of Q1, TTLT of Q2 and Q3):"
            ),
            table(
                (
                    "quarter",
                    "requests/s",
                    *(f"{LABELS[policy]} {tier}" for tier in QOSERVE_3.tiers for policy in windows),
                ),
                [
                    (
                        f"{phase + 1}",
                        f"{LOW_RPS * (2.5 if phase % 2 else 1):g}",
                        *(
                            figure(phase_p99_s(seen, tier, phase))
                            for tier in QOSERVE_3.tiers
                            for seen in windows.values()
                        ),
                    )
                    for phase in range(phases)
                ],
            ),
            "The longest latency of a request in seconds (for QoServe published of the relegated):",
            table(("policy", "published", "ours", "ratio", ""), longest),
            table(("claim", "here"), claims(windows)),
        )
    )


def swinging(policy: str, duration_s: float) -> Run:
    """The run of a policy. QoServe's alpha follows the load."""
    settings = ROUND_ROBIN if policy == "qoserve" else POLICIES[policy]
    run = Run(
        policy=policy,
        settings=dict(settings),
        workload="azure-code",
        rate_rps=LOW_RPS,
        duration_s=duration_s,
    )
    return replace(run, bursts=SWING, important=IMPORTANT, window_s=WINDOW_S)


def windows_of(result: RunResult | None) -> Windows | None:
    return None if result is None else result.windows


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


def phase_p99_s(windows: Windows | None, tier: str, phase: int) -> float | None:
    """The mean over a quarter of an hour; None: not run."""
    if windows is None:
        return None
    each = int(PHASE_S / WINDOW_S)
    known = [p99 for p99 in windows.p99_s[tier][phase * each : (phase + 1) * each] if p99]
    return sum(known) / len(known) if known else None


def claims(windows: dict[str, Windows | None]) -> list[tuple[str, str]]:
    """(claim, verdict) of section 4.3, by the quarters in which the mean p99 of Q1 is late."""

    def late(policy: str) -> set[int]:
        """Those quarters, counted from 1."""
        bound_s, found, phase = QOSERVE_3.tiers["Q1"].slo.ttft_s or 0.0, set(), 0
        while (p99_s := phase_p99_s(windows[policy], "Q1", phase)) is not None:
            phase += 1
            if p99_s > bound_s:
                found.add(phase)
        return found

    def verdict(policy: str, holds: bool) -> str:
        return MISSING if windows[policy] is None else "holds" if holds else "does not hold"

    fcfs, edf = late("fcfs"), late("edf")
    phases = set(range(1, 1 + max(fcfs | edf | {1})))
    return [
        (
            "FCFS is late from the first burst (Q1: the second quarter) on, and never recovers",
            verdict("fcfs", fcfs == phases - {1}),
        ),
        (
            "EDF sustains the first burst, and is late from the second (Q1: the fourth quarter) on",
            verdict("edf", edf == phases - {1, 2, 3}),
        ),
    ]


SECTION = Section(
    name="figure12",
    title="Figures 12 and 13: transient overload",
    paper="""\
One replica; 2 and 5 requests/s in turn, 15 minutes each, over four hours; a random fifth of each
tier is unimportant. The paper does not name the workload: we take code. Alpha follows the load
(section 3.6).""",
    hours=4,
    render=render,
    discussion="""\
What differs: the mean load, 3.5 requests/s, is less than QoServe carries on this profile (Figure
7), and the deadlines of Q2 and Q3 can absorb a quarter of an hour above it. So QoServe relegates
next to nothing here, and the longest latency published of its relegated requests has no
counterpart: of 50,000 it violates three, two of them important. One of these two is what QoServe's
Q1 shows in the tenth quarter. Under EDF Q3 is late a quarter before Q1 is: what the first burst
leaves waits behind all of Q1 and Q2.
""",
)
