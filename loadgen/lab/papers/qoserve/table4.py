"""QoServe Table 4: silos of 13 and 10 replicas against 10 shared replicas."""

from collections.abc import Mapping

from msgspec.structs import replace

from loadgen.lab.papers.qoserve.systems import run
from loadgen.lab.papers.section import (
    CLOSE_POINTS,
    Results,
    Section,
    compare,
    figure,
    latency_s,
    violated_percent,
)
from loadgen.markdown import table
from loadgen.trials.figures import Figures, Group
from shared.rules.tiers import QOSERVE_3

RATE_RPS = 35.0
PAPER_S = 360_000 / RATE_RPS
CHUNKS = {"Q1": "256", "Q2": "2048", "Q3": "2048"}  # section 4, baselines
# p99 in seconds of Q1 (TTFT), Q2 and Q3 (TTLT); violated requests in % of all.
PUBLISHED = {
    "Silo (7,3,3)": (3.09, 172.84, 171.11, 0.24),
    "Silo (6,2,2)": (11.39, 4681.56, 4678.17, 60.4),
    "QoServe (10)": (3.38, 55.79, 204.61, 0.0),
}
SILOS = {"Silo (7,3,3)": (7, 3, 3), "Silo (6,2,2)": (6, 2, 2), "Silo (4,3,3)": (4, 3, 3)}
# section 4.1.1: the p99 of Q1 in this silo, and roughly the violated part of Q1 in %
SILO_433 = (385.36, 95.0)


def silo(
    results: Results, replicas: tuple[int, ...], duration_s: float
) -> dict[str, Figures | None]:
    """The figures of each tier on replicas of its own, first come first served."""
    by_tier = {}
    for tier, count in zip(QOSERVE_3.tiers, replicas, strict=True):
        alone = run("fcfs", "azure-code", RATE_RPS, duration_s, chunk_tokens=CHUNKS[tier])
        by_tier[tier] = results.figures(replace(alone, only=tier, replicas=count))
    return by_tier


def render(results: Results, duration_s: float) -> str:
    shared = results.figures(
        replace(run("qoserve", "azure-code", RATE_RPS, duration_s), replicas=10)
    )
    groups: dict[str, Mapping[str, Group | None]] = {
        "QoServe (10)": {
            tier: None if shared is None else shared.by_tier[tier] for tier in QOSERVE_3.tiers
        }
    }
    for name, replicas in SILOS.items():
        by_tier = silo(results, replicas, duration_s)
        groups[name] = {
            tier: None if figures is None else figures.by_tier[tier]
            for tier, figures in by_tier.items()
        }
    rows = []
    for name, published in PUBLISHED.items():
        for (tier, group), p99 in zip(groups[name].items(), published, strict=False):
            rows.append((name, f"p99 of {tier}, s", *compare(p99, latency_s(tier, group, "p99"))))
        rows.append(
            (name, "violated", *compare(published[3], overall_percent(groups[name]), percent=True))
        )
    p99, violated = SILO_433
    strict = groups["Silo (4,3,3)"]["Q1"]
    rows.append(("Silo (4,3,3)", "p99 of Q1, s", *compare(p99, latency_s("Q1", strict, "p99"))))
    rows.append(
        (
            "Silo (4,3,3)",
            "violated of Q1",
            *compare(violated, violated_percent(strict), percent=True),
        )
    )
    ten = overall_percent(groups["QoServe (10)"])
    thirteen = overall_percent(groups["Silo (7,3,3)"])
    holds = None if ten is None or thirteen is None else ten <= CLOSE_POINTS
    verdict = "not run" if holds is None else "it holds" if holds else "it does not hold"
    backlog = latency_s("Q2", groups["Silo (6,2,2)"]["Q2"], "p99")
    ours = served_rps(backlog, duration_s)
    theirs = served_rps(PUBLISHED["Silo (6,2,2)"][1], PAPER_S)
    return "\n\n".join(
        (
            table(("deployment", "figure", "published", "ours", "ratio", ""), rows),
            (
                "The claim, that ten shared replicas serve the load of thirteen siloed ones "
                f"with at most {CLOSE_POINTS:g} % violated: {verdict} "
                f"({figure(ten, percent=True)} against {figure(thirteen, percent=True)})."
            ),
            (
                "By the growth of the backlog, each of the two replicas that serve Q2 in (6,2,2) "
                f"with chunks of 2,048 serves {figure(ours)} requests/s here, and "
                f"{figure(theirs)} in the paper."
            ),
        )
    )


def served_rps(backlog_s: float | None, duration_s: float) -> float | None:
    """Requests/s of each of the two replicas of Q2, if the last request waits `backlog_s`."""
    if backlog_s is None:
        return None
    return RATE_RPS / len(CHUNKS) / 2 * duration_s / (duration_s + backlog_s)


def overall_percent(groups: Mapping[str, Group | None]) -> float | None:
    """The violated requests of all tiers together in %; None: not all of them have run."""
    known = [group for group in groups.values() if group is not None]
    if len(known) < len(groups):
        return None
    return 100 * sum(group.violated for group in known) / sum(group.offered for group in known)


SECTION = Section(
    name="table4",
    title="Table 4: silos against a shared cluster",
    paper="""\
35 requests/s of the code workload, 360,000 requests (2.9 hours), a third each in Q1, Q2 and Q3. A
silo is a set of replicas for one tier: FCFS, with chunks of 256 tokens for Q1 and 2,048 for the
others. Every deployment routes round robin.""",
    hours=2.9,
    render=render,
    discussion="""\
What differs: the backlog of a silo that cannot keep up grows as long as requests arrive, and with
it p99 and the violations. A small difference in what a replica serves is a large one in both. Only
two quantiles of the code workload are known.
""",
)
