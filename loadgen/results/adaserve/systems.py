"""What AdaServe's experiments have in common: the systems, the load, and how figures stand beside
each other.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from loadgen.lab.figures import Figures
from loadgen.results.experiment import Run
from loadgen.results.qoserve.systems import with_shares
from loadgen.results.section import MISSING, Lab, compare, figure, table
from shared.tiers import TierSet, load_tiers

PROFILE = "a100-llama3-70b-tp4"
# 1.24 billion parameters on one GPU, 70.6 billion over four: what each GPU reads, and computes for
# a token, is to the target's as these.
DRAFT = round(1.24 / (70.6 / 4), 2)
RATE_RPS = 4.0  # section 6.2, where the rate is fixed
TIERS = load_tiers("adaserve-3")
# Figure 7, which is Azure's trace of 2023 cut to six minutes: requests per twelfth of the run over
# their mean, in the artifact's trace of 3.9 requests/s.
TWELFTHS = (0.34, 0.82, 0.99, 0.92, 0.89, 1.01, 1.24, 1.26, 1.17, 1.17, 1.13, 1.06)

OURS = "AdaServe"
# As the artifact starts them: vLLM and vLLM-Spec without chunked prefill, Sarathi as vLLM with
# chunks of 2,048 tokens.
BASELINES: Mapping[str, tuple[str, dict[str, str]]] = {
    "vLLM": ("vllm", {"mode": "prefill_first", "max_num_seqs": "512"}),
    "Sarathi": ("fcfs", {"chunk_tokens": "2048"}),
    **{
        f"vLLM-Spec({n})": (
            "vllm",
            {"mode": "prefill_first", "max_num_seqs": "512", "spec_tokens": str(n)},
        )
        for n in (4, 6, 8)
    },
}
CHUNKED = "Spec(2), chunked"  # not in the paper: few drafts, and prompts in chunks beside them
SYSTEMS = {
    OURS: ("adaserve", dict[str, str]()),
    **BASELINES,
    CHUNKED: ("vllm", {"spec_tokens": "2"}),
}


def swing(multiples: Sequence[float], duration_s: float) -> str:
    """As --bursts has it: the run in equal steps."""
    return ",".join(f"{duration_s / len(multiples):g}:{multiple:g}" for multiple in multiples)


def run(system: str, rate_rps: float, duration_s: float, tiers: TierSet = TIERS) -> Run:
    policy, settings = SYSTEMS[system]
    return Run(
        policy=policy,
        settings=settings,
        workload="adaserve",
        rate_rps=rate_rps,
        duration_s=duration_s,
        tiers=tiers,
        bursts=swing(TWELFTHS, duration_s),
        profile=PROFILE,
        definition="mean-tpot",
        context_tokens=8192,
        draft=DRAFT,
    )


def coding_share(share: float) -> TierSet:
    """What is left is equal parts of the others."""
    return with_shares(
        TIERS,
        f"adaserve-{round(100 * share)}",
        {"coding": share, "chat": (1 - share) / 2, "summary": (1 - share) / 2},
    )


def coding_scale(scale: float) -> TierSet:
    """Coding held to so many times its pace alone."""
    coding = TIERS.tiers["coding"]
    return replace(
        TIERS,
        name=f"adaserve-{scale:g}x",
        tiers={**TIERS.tiers, "coding": replace(coding, slo=replace(coding.slo, tbt_x=scale))},
    )


Found = Mapping[str, Figures | None]  # by system


def served(lab: Lab, of: Mapping[str, Run]) -> Found:
    return {system: lab.figures(run) for system, run in of.items()}


def varied(
    lab: Lab,
    head: str,
    tiers: Mapping[str, TierSet],
    duration_s: float,
    *,
    unattained: float,
    goodput: float,
) -> str:
    """Figures 10 and 11: the systems of the paper at RATE_RPS, over `tiers` by what `head` says;
    and what is claimed at most.
    """
    systems, rivals = [OURS, *BASELINES], list(BASELINES)
    found = {
        name: served(lab, {system: run(system, RATE_RPS, duration_s, of) for system in systems})
        for name, of in tiers.items()
    }
    return "\n\n".join(
        (
            "SLO attainment:",
            by_system(head, found, attained_percent, percent=True),
            "Goodput, tokens/s of attained requests:",
            by_system(head, found, lambda of: of.goodput_tokens_per_s),
            claims(
                (
                    (
                        "unattained, fewer by at most",
                        unattained,
                        most([fewer_unattained(of, rivals) for of in found.values()]),
                    ),
                    (
                        "goodput, at most",
                        goodput,
                        most([more_goodput(of, rivals) for of in found.values()]),
                    ),
                )
            ),
        )
    )


def attained_percent(of: Figures) -> float:
    return 100 * (1 - of.violated_fraction)


def by_system(
    head: str,
    rows: Mapping[str, Found],
    value: Callable[[Figures], float],
    *,
    percent: bool = False,
) -> str:
    """A row for each thing varied, a column for each system."""
    systems = list(next(iter(rows.values())))
    lines = [
        (
            row,
            *(
                MISSING if of is None else figure(value(of), percent=percent)
                for of in found.values()
            ),
        )
        for row, found in rows.items()
    ]
    return table((head, *systems), lines)


def fewer_unattained(found: Found, rivals: Sequence[str]) -> float | None:
    """How many times as many the best of the rivals leaves unattained; ours count as a hundredth of
    the requests at least.
    """
    ours, others = _of(found, rivals)
    return (
        None
        if ours is None
        else min(of.violated for of in others) / max(0.01 * ours.offered, ours.violated)
    )


def more_attained(found: Found, rivals: Sequence[str]) -> float | None:
    ours, others = _of(found, rivals)
    return (
        None
        if ours is None
        else attained_percent(ours) / max(1e-9, *(attained_percent(of) for of in others))
    )


def more_goodput(found: Found, rivals: Sequence[str]) -> float | None:
    ours, others = _of(found, rivals)
    return (
        None
        if ours is None
        else ours.goodput_tokens_per_s / max(1e-9, *(of.goodput_tokens_per_s for of in others))
    )


def _of(found: Found, rivals: Sequence[str]) -> tuple[Figures | None, list[Figures]]:
    others = [of for system in rivals if (of := found[system]) is not None]
    return (found[OURS] if len(others) == len(rivals) else None), others


def most(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def claims(rows: Sequence[tuple[str, float, float | None]]) -> str:
    """(what is claimed, published, ours)."""
    lines = [(name, *compare(published, ours)) for name, published, ours in rows]
    return table(("against the best baseline", "published", "ours", "ratio", ""), lines)
