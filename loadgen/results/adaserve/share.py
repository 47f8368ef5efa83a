"""AdaServe Figure 10: how many are urgent."""

from loadgen.results.adaserve import systems as runs
from loadgen.results.section import Lab, Section

SHARES = (0.3, 0.5, 0.7, 0.9)


def body(lab: Lab, duration_s: float) -> str:
    by_share = {f"{100 * share:g} %": runs.coding_share(share) for share in SHARES}
    return runs.varied(lab, "coding", by_share, duration_s, unattained=4.3, goodput=1.3)


SECTION = Section(
    name="adaserve-share",
    title="Figure 10: the share of urgent requests",
    paper="4.0 requests/s, 30 to 90 % coding, the others equal. Claimed for this model over the best baseline: up to 4.3 times fewer "
    "unattained and 30 % more goodput; AdaServe and vLLM-Spec gain with the share, as coding prompts are shorter than summaries'.",
    hours=0.07,
    body=body,
    notes="""\
A hundredth of the requests is the least that counts as unattained of ours, so that no ratio is to nothing.

What differs: in the paper AdaServe is steady; here it too loses where summaries are many: their prompts share the pass with its decodes.
""",
)
