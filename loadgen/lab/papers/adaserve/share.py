"""AdaServe Figure 10: the share of urgent requests."""

from loadgen.lab.papers.adaserve import systems as runs
from loadgen.lab.papers.section import Results, Section

SHARES = (0.3, 0.5, 0.7, 0.9)


def render(results: Results, duration_s: float) -> str:
    by_share = {f"{100 * share:g} %": runs.coding_share(share) for share in SHARES}
    return runs.render_over_tiers(
        results, "coding", by_share, duration_s, unattained=4.3, goodput=1.3
    )


SECTION = Section(
    name="adaserve-share",
    title="Figure 10: the share of urgent requests",
    paper="""\
4.0 requests/s, 30 to 90 % coding, the others equal. Claimed for this model over the best baseline:
up to 4.3 times fewer unattained requests and 30 % more goodput. AdaServe and vLLM-Spec gain with
the share, as the prompts of coding are shorter than those of summaries.""",
    hours=0.07,
    render=render,
    discussion="""\
At least a hundredth of our requests count as unattained, so that no ratio divides by nothing.

What differs: in the paper AdaServe is steady. Here it loses 9 points where summaries are many:
their prompts share the pass with its decodes. Its lead is larger than claimed, since at 50 % coding
and above it misses few requests.
""",
)
