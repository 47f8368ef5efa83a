"""AdaServe Figure 10: how many are urgent."""

from loadgen.results import adaserve_runs as runs
from loadgen.results.section import Lab, Section

SHARES = (0.3, 0.5, 0.7, 0.9)


def body(lab: Lab, duration_s: float) -> str:
    systems, rivals = [runs.OURS, *runs.BASELINES], list(runs.BASELINES)
    found = {
        f"{100 * share:g} %": runs.served(
            lab, {system: runs.run(system, runs.RATE_RPS, duration_s, runs.coding_share(share)) for system in systems}
        )
        for share in SHARES
    }
    return "\n\n".join(
        (
            "SLO attainment:",
            runs.by_system("coding", found, runs.attained_percent, percent=True),
            "Goodput, tokens/s of attained requests:",
            runs.by_system("coding", found, lambda of: of.goodput_tokens_per_s),
            runs.claims(
                (
                    ("unattained, fewer by at most", 4.3, runs.most([runs.fewer_unattained(of, rivals) for of in found.values()])),
                    ("goodput, at most", 1.3, runs.most([runs.more_goodput(of, rivals) for of in found.values()])),
                )
            ),
        )
    )


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
