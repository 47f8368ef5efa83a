"""AdaServe Figures 13 and 14: a synthetic trace in which each category has its own peak."""

from msgspec.structs import replace

from loadgen.lab.papers.adaserve import systems as runs
from loadgen.lab.papers.section import Results, Section, compare
from loadgen.markdown import table

# Figure 13: requests in each twelfth of the six minutes of the artifact's trace.
COUNTS = {
    "chat": (46, 78, 125, 106, 76, 42, 6, 7, 0, 0, 0, 0),
    "coding": (1, 7, 12, 35, 84, 104, 119, 84, 34, 10, 4, 1),
    "summary": (0, 0, 0, 1, 4, 14, 42, 93, 87, 108, 75, 40),
}
TWELFTH_S = 30.0
# SLO attainment in %, Figure 14, Llama3-70B.
PUBLISHED = {
    "AdaServe": 83.6,
    "Sarathi": 65.6,
    "vLLM": 52.6,
    "vLLM-Spec(4)": 51.6,
    "vLLM-Spec(6)": 47.8,
    "vLLM-Spec(8)": 38.4,
}


def render(results: Results, duration_s: float) -> str:
    rows = []
    shown = {system: (system, runs.LLAMA.draft) for system in PUBLISHED} | {
        f"{system}, draft without CUDA graphs": (system, runs.LLAMA.eager)
        for system in PUBLISHED
        if system == runs.OURS or system.startswith("vLLM-Spec")
    }
    for name, (system, draft) in shown.items():
        run = replace(runs.run(system, 1.0, duration_s), bursts=bursts(duration_s), draft=draft)
        figures = results.figures(run)
        if figures is None:
            attained, tiers = None, [""] * len(COUNTS)
        else:
            attained = runs.attained_percent(figures)
            tiers = [
                f"{100 * (1 - group.violated_fraction):.3g} %" for group in figures.by_tier.values()
            ]
        rows.append((name, *compare(PUBLISHED[system], attained, percent=True), *tiers))
    return table(
        ("system", "published", "ours", "ratio", "", *(f"our {tier}" for tier in sorted(COUNTS))),
        rows,
    )


def bursts(duration_s: float) -> str:
    """The rate of each tier over the run, as --bursts takes it; the same in a shorter run."""
    return ";".join(
        f"{tier}={runs.swing([count / TWELFTH_S for count in counts], duration_s)}"
        for tier, counts in COUNTS.items()
    )


SECTION = Section(
    name="adaserve-shift",
    title="Figures 13 and 14: peaks at different times",
    paper="""\
Six minutes in which first chat, then coding, then summaries arrive at up to 4 requests/s. The
published values are SLO attainment.""",
    hours=0.1,
    render=render,
    discussion="""\
What differs: vLLM-Spec with long drafts and vLLM do worse than published. By this profile a pass of
many tokens is expensive. They lose the summaries at the end: each of the prompts stalls all
decodes.

What was tried: drafts without CUDA graphs (last rows). AdaServe hardly loses by them, but vLLM-Spec
falls to a third of the published values and below. So the paper's vLLM-Spec did not pay that much
for a step, and the cost of launching does not explain why its long drafts do worse here.
""",
)
