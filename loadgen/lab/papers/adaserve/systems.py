"""The systems, the load and the tables that AdaServe's experiments share."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.qoserve.systems import with_shares
from loadgen.lab.papers.section import MISSING, Results, compare, figure
from loadgen.markdown import table
from loadgen.trials.figures import Figures
from shared.rules.tiers import TierSet, load_tiers


class Model(NamedTuple):
    """A model of the paper (Table 1), with its draft.

    draft: the draft's parameters on one GPU over the target's on each of its GPUs. Reads and
        compute per GPU and token are in this proportion.
    eager: the cost of the draft without CUDA graphs.
    depth_max, depth_min, max_requests: what the artifact passes for this model.
    """

    profile: str
    draft: float
    eager: tuple[float, float]
    depth_max: int
    depth_min: int
    max_requests: int

    @property
    def settings(self) -> dict[str, str]:
        """The settings of AdaServe. D_min follows from the budget."""
        return {"depth_max": f"{self.depth_max}", "max_requests": f"{self.max_requests}"}


# A step of a draft whose kernels are launched one by one. By Splitwise's published measurements a
# decode of Llama-2-70B, which has 80 layers, takes 45 ms on A100s, on four as on eight: what
# launching takes. The draft's layers take as many 80ths of it; reading a prompt takes no longer.
LAUNCH_LAYER_S = 0.045 / 80


def eager(layers: int, draft: float, alone_s: float) -> tuple[float, float]:
    """The cost of a draft with this many layers, without CUDA graphs, beside a target whose decode
    alone takes `alone_s`.
    """
    return round(layers * LAUNCH_LAYER_S / alone_s, 2), draft


LLAMA_DRAFT = round(1.24 / (70.6 / 4), 2)
QWEN_DRAFT = round(0.494 / (32.76 / 2), 2)
LLAMA = Model("a100-llama3-70b-tp4", LLAMA_DRAFT, eager(16, LLAMA_DRAFT, 0.0317), 8, 4, 96)
QWEN = Model("a100-qwen2.5-32b-tp2", QWEN_DRAFT, eager(24, QWEN_DRAFT, 0.0271), 5, 3, 80)
RATE_RPS = 4.0  # section 6.2, where the rate is fixed
TIERS = load_tiers("adaserve-3")
# Figure 7, which is Azure's trace of 2023 cut to six minutes: the requests in each twelfth of the
# run over their mean, from the artifact's trace of 3.9 requests/s.
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
    """A run in equal steps, as --bursts takes it."""
    return ",".join(f"{duration_s / len(multiples):g}:{multiple:g}" for multiple in multiples)


def run(
    system: str,
    rate_rps: float,
    duration_s: float,
    tiers: TierSet = TIERS,
    model: Model = LLAMA,
) -> Run:
    policy, settings = SYSTEMS[system]
    return Run(
        policy=policy,
        settings={**model.settings, **settings} if system == OURS else settings,
        workload="adaserve",
        rate_rps=rate_rps,
        duration_s=duration_s,
        tiers=tiers,
        bursts=swing(TWELFTHS, duration_s),
        profile=model.profile,
        definition="mean-tpot",
        context_tokens=8192,
        draft=model.draft,
    )


def coding_share(share: float) -> TierSet:
    """Tiers with this share of coding. The other two share the rest equally."""
    return with_shares(
        TIERS,
        f"adaserve-{round(100 * share)}",
        {"coding": share, "chat": (1 - share) / 2, "summary": (1 - share) / 2},
    )


def coding_scale(scale: float) -> TierSet:
    """Tiers in which coding's SLO is `scale` times its pace alone."""
    coding = TIERS.tiers["coding"]
    return replace(
        TIERS,
        name=f"adaserve-{scale:g}x",
        tiers={**TIERS.tiers, "coding": replace(coding, slo=replace(coding.slo, tbt_x=scale))},
    )


BySystem = Mapping[str, Figures | None]


def figures_of(results: Results, runs: Mapping[str, Run]) -> BySystem:
    return {system: results.figures(run) for system, run in runs.items()}


def render_over_tiers(
    results: Results,
    header: str,
    tier_sets: Mapping[str, TierSet],
    duration_s: float,
    *,
    unattained: float,
    goodput: float,
) -> str:
    """Figures 10 and 11: the systems of the paper at RATE_RPS, with a row for each tier set.

    `header` is the title of the first column. `unattained` and `goodput` are the ratios that the
    paper claims as its largest.
    """
    systems, rivals = [OURS, *BASELINES], list(BASELINES)
    rows = {
        name: figures_of(
            results,
            {system: run(system, RATE_RPS, duration_s, tiers) for system in systems},
        )
        for name, tiers in tier_sets.items()
    }
    return "\n\n".join(
        (
            "SLO attainment:",
            by_system(header, rows, attained_percent, percent=True),
            "Goodput, tokens/s of attained requests:",
            by_system(header, rows, lambda figures: figures.goodput_tokens_per_s),
            claims(
                (
                    (
                        "unattained, fewer by at most",
                        unattained,
                        largest([unattained_ratio(row, rivals) for row in rows.values()]),
                    ),
                    (
                        "goodput, at most",
                        goodput,
                        largest([goodput_ratio(row, rivals) for row in rows.values()]),
                    ),
                )
            ),
        )
    )


def attained_percent(figures: Figures) -> float:
    return 100 * (1 - figures.violated_fraction)


def by_system(
    header: str,
    rows: Mapping[str, BySystem],
    value: Callable[[Figures], float],
    *,
    percent: bool = False,
) -> str:
    """A table with a row for each value of what is varied, and a column for each system."""
    systems = list(next(iter(rows.values())))
    lines = [
        (
            name,
            *(
                MISSING if figures is None else figure(value(figures), percent=percent)
                for figures in row.values()
            ),
        )
        for name, row in rows.items()
    ]
    return table((header, *systems), lines)


def unattained_ratio(row: BySystem, rivals: Sequence[str]) -> float | None:
    """The unattained requests of the best rival over ours; None: not all have run.

    At least a hundredth of our requests count as unattained.
    """
    ours, others = _ours_and_others(row, rivals)
    if ours is None:
        return None
    fewest = min(figures.violated for figures in others)
    return fewest / max(0.01 * ours.offered, ours.violated)


def attainment_ratio(row: BySystem, rivals: Sequence[str]) -> float | None:
    """Our attainment over that of the best rival; None: not all have run."""
    ours, others = _ours_and_others(row, rivals)
    if ours is None:
        return None
    return attained_percent(ours) / max(1e-9, *(attained_percent(figures) for figures in others))


def goodput_ratio(row: BySystem, rivals: Sequence[str]) -> float | None:
    """Our goodput over that of the best rival; None: not all have run."""
    ours, others = _ours_and_others(row, rivals)
    if ours is None:
        return None
    highest = max(1e-9, *(figures.goodput_tokens_per_s for figures in others))
    return ours.goodput_tokens_per_s / highest


def _ours_and_others(row: BySystem, rivals: Sequence[str]) -> tuple[Figures | None, list[Figures]]:
    """Ours is None unless all rivals have run."""
    others = [figures for system in rivals if (figures := row[system]) is not None]
    return (row[OURS] if len(others) == len(rivals) else None), others


def largest(values: Sequence[float | None]) -> float | None:
    """The largest of the values; None while one of them is unknown."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def claims(rows: Sequence[tuple[str, float, float | None]]) -> str:
    """A table of claims. `rows` has (claim, published, ours)."""
    lines = [(name, *compare(published, ours)) for name, published, ours in rows]
    return table(("against the best baseline", "published", "ours", "ratio", ""), lines)
