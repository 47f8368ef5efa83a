"""AdaServe's set-up, with slackline beside AdaServe and others that draft."""

from collections.abc import Mapping

from msgspec.structs import replace

from loadgen.lab.papers.adaserve import systems as adaserve
from loadgen.lab.papers.adaserve.rate import LLAMA
from loadgen.lab.papers.section import MISSING, Results, Section
from loadgen.lab.papers.slackline.systems import OURS, SEEDS, spread
from loadgen.markdown import table

# At least so much of our requests counts as unattained, as on the page of AdaServe's figures.
LEAST = 0.01
SYSTEMS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    f"`{OURS}`": (OURS, {}),
    "`slos_serve:speculate=paper`": ("slos_serve", {"speculate": "paper"}),
    "AdaServe": ("adaserve", adaserve.LLAMA.settings),
    "vLLM-Spec(4)": adaserve.SYSTEMS["vLLM-Spec(4)"],
}


def render(results: Results, duration_s: float) -> str:
    load = adaserve.run(adaserve.OURS, LLAMA.highest_rps, duration_s)
    rows = []
    ours = 0.0  # the unattained requests of ours, the first row
    for name, (policy, settings) in SYSTEMS.items():
        runs = [replace(load, policy=policy, settings=dict(settings), seed=seed) for seed in SEEDS]
        figures = [found for run in runs if (found := results.figures(run)) is not None]
        if len(figures) < len(SEEDS):
            rows.append((name, MISSING, MISSING, MISSING))
            continue
        unattained = sum(each.violated for each in figures)
        offered = sum(each.offered for each in figures)
        ours = ours or max(unattained, LEAST * offered)
        first_s = [tier.ttft_s.p99 or 0.0 for each in figures for tier in each.by_tier.values()]
        rows.append(
            (
                name,
                spread([100 * (1 - each.violated_fraction) for each in figures]),
                "" if policy == OURS else f"{unattained / ours:.3g}",
                f"{max(first_s):.1f}",
            )
        )
    head = ("", "attained, %", "times as many unattained", "longest p99 TTFT of a tier, s")
    return table(head, rows)


SECTION = Section(
    name="slackline-adaserve",
    title="AdaServe's set-up",
    paper=f"""\
Llama-3.1-70B on four A100s at {LLAMA.highest_rps:g} requests/s, as in
[results.md](results.md#figures-8-9-and-12-over-the-rate): requests whose SLO was met, in % of those
offered, the mean of {len(SEEDS)} seeds with the least and the most of them, and how many times as
many were unattained as by `{OURS}`, of whose requests at least a hundredth counts as unattained.
First tokens have no deadline there, so the table says how long they took. AdaServe claims
{LLAMA.unattained:g} times fewer unattained requests than the best of vLLM, Sarathi and
vLLM-Spec.""",
    hours=0.07,
    render=render,
    discussion="""\
`slackline` misses one request with the first seed and none with the others. vLLM-Spec(4), the best
of the paper's baselines at this rate, leaves 61 times as many unattained, AdaServe 22 times and
`slos_serve` 7 times. It pays with first tokens, which no SLO bounds there: they take up to 6.4 s,
AdaServe's 1.0 s and those of vLLM-Spec(4) 0.7 s. With deadlines for first tokens this has not been
run.
""",
)
