"""SLOs-Serve Figure 14: what each of its parts gains."""

from collections.abc import Mapping

from loadgen.results import slos_serve_runs as runs
from loadgen.results.section import Lab, Section, compare, figure, table
from loadgen.results.slos_serve_capacity import FIRST_RPS

REPLICAS = 4
ROUTED, IN_TURN = f"{REPLICAS} replicas", f"{REPLICAS}, one asked"
WHOLE, BY_MEAN, UNDRAFTED, BARE = "one replica", "drafts by the mean", "no drafts", "nor best-effort tier"
SETTINGS: Mapping[str, Mapping[str, str]] = {
    ROUTED: {},
    IN_TURN: {"router": "round_robin"},
    WHOLE: {},
    BY_MEAN: {"speculate": "paper"},  # appendix D as written
    UNDRAFTED: {"speculate": "never"},
    BARE: {"speculate": "never", "best_effort": "false"},  # the paper's baseline, prefill first
}
# Of those that have a draft; tried first, requests/s per replica: with several, one asked, and bare.
SEVERAL_RPS = {"chatbot": (6.4, 6.1, 4.8), "coder": (5.2, 4.0, 0.19), "summarizer": (5.0, 4.4, 3.3), "mixed": (6.3, 5.8, 3.9)}


def body(lab: Lab, duration_s: float) -> str:
    found: dict[str, dict[str, float | None]] = {}
    for name, (routed_rps, in_turn_rps, bare_rps) in SEVERAL_RPS.items():
        first = {ROUTED: routed_rps, IN_TURN: in_turn_rps, BARE: bare_rps}
        found[name] = {}
        for row, settings in SETTINGS.items():
            replicas = REPLICAS if row in (ROUTED, IN_TURN) else 1
            rps = replicas * first.get(row, FIRST_RPS[name][runs.OURS])
            rate = runs.carried(lab, runs.scenario(runs.OURS, name, rps, duration_s, replicas, **settings))
            found[name][row] = None if rate is None else rate / replicas
    parts = (
        ("request routing", 1.19, ROUTED, IN_TURN),
        ("speculation", 1.66, WHOLE, UNDRAFTED),
        ("speculation, drafts by the mean", 1.66, BY_MEAN, UNDRAFTED),
        ("burst resilience", 1.34, UNDRAFTED, BARE),
    )
    gains = []
    for part, published, more, less in parts:
        each = [runs.ratio(of[more], of[less]) for of in found.values()]
        gains.append((part, *compare(published, runs.mean(each)), *map(figure, each)))
    return "\n\n".join(
        (
            "Requests/s per replica:",
            table(("", *SETTINGS), [(name, *map(figure, of.values())) for name, of in found.items()]),
            "What each part gains, in the geometric mean and by scenario:",
            table(("part", "published", "ours", "ratio", "", *found), gains),
        )
    )


SECTION = Section(
    name="slos-serve-ablation",
    title="Figure 14: ablation",
    paper="OPT-7B; request routing, speculation and burst resilience are taken away one after the other, down to a prefill-first baseline, "
    "in four scenarios, which are not named: here those that have a draft. Published gains: 1.19 by routing (Coder 1.92), 1.66 by "
    "speculation (ChatBot 2.01, Summarizer 2.02), 1.34 by burst resilience (Coder 1.66). Here routing is taken away from four replicas, "
    "the rest from one: replicas that are asked in turn, once, know nothing of each other.",
    hours=1 / 15,
    body=body,
    notes="",
)
