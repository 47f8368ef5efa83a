"""The laboratory's runs for AdaServe's figures. Figure 14 has numbers; others are the text's."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.papers.run import Run
from loadgen.lab.papers.table import Row, Table
from loadgen.lab.papers.values import Value, combined, highest, lowest, met, of, over, violated
from shared.rules.tiers import Tier, TierSet, load_tiers

SECONDS = 3600 * 0.07
TIERS = load_tiers("adaserve-3")


class Model(NamedTuple):
    """A model of the paper (Table 1), with its draft.

    draft: the draft's parameters on one GPU over the target's on each of its GPUs. Reads and
        compute per GPU and token are in this proportion.
    depth_max, max_requests: what the artifact passes for this model. D_min follows from the budget.
    """

    profile: str
    draft: float
    depth_max: str
    max_requests: str
    rates_rps: Sequence[float]  # up to the highest of the paper


LLAMA = Model(
    "a100-llama3-70b-tp4", round(1.24 / (70.6 / 4), 2), "8", "96", (2.6, 3.4, 4.0, 4.4, 4.8)
)
QWEN = Model("a100-qwen2.5-32b-tp2", round(0.494 / (32.76 / 2), 2), "5", "80", (2.4, 4.2))
# Figure 7, which is Azure's trace of 2023 cut to six minutes: the requests in each twelfth of the
# run over their mean, from the artifact's trace of 3.9 requests/s.
TWELFTHS = (0.34, 0.82, 0.99, 0.92, 0.89, 1.01, 1.24, 1.26, 1.17, 1.17, 1.13, 1.06)
# Figure 13: requests in each twelfth of the six minutes of the artifact's trace.
COUNTS = {
    "chat": (46, 78, 125, 106, 76, 42, 6, 7, 0, 0, 0, 0),
    "coding": (1, 7, 12, 35, 84, 104, 119, 84, 34, 10, 4, 1),
    "summary": (0, 0, 0, 1, 4, 14, 42, 93, 87, 108, 75, 40),
}
OURS = "AdaServe"
WHOLE = {"mode": "prefill_first", "max_num_seqs": "512"}
# As the artifact starts them.
BASELINES: dict[str, tuple[str, dict[str, str]]] = {
    "vLLM": ("vllm", WHOLE),
    "Sarathi": ("fcfs", {"chunk_tokens": "2048"}),
    **{f"vLLM-Spec({n})": ("vllm", {**WHOLE, "spec_tokens": str(n)}) for n in (4, 6, 8)},
}
CHUNKED = "Spec(2), chunked"  # not in the paper: few drafts, and prompts in chunks beside them
SYSTEMS = {
    OURS: ("adaserve", dict[str, str]()),
    **BASELINES,
    CHUNKED: ("vllm", {"spec_tokens": "2"}),
}


def swing(multiples: Sequence[float], duration_s: float) -> str:
    """These multiples of the rate in equal steps over a run, as --bursts takes them."""
    return ",".join(f"{duration_s / len(multiples):g}:{multiple:g}" for multiple in multiples)


def run_of(system: str, rate_rps: float, tiers: TierSet = TIERS, model: Model = LLAMA) -> Run:
    policy, settings = SYSTEMS[system]
    if system == OURS:
        settings = {"depth_max": model.depth_max, "max_requests": model.max_requests}
    return Run(
        policy=policy,
        settings=settings,
        workload="adaserve",
        rate_rps=rate_rps,
        duration_s=SECONDS,
        tiers=tiers,
        bursts=swing(TWELFTHS, SECONDS),
        profile=model.profile,
        definition="mean-tpot",
        context_tokens=8192,
        draft=model.draft,
    )


def share(coding: float) -> TierSet:
    """Tiers with this share of coding. The other two share the rest equally."""
    shares = {"coding": coding, "chat": (1 - coding) / 2, "summary": (1 - coding) / 2}
    tiers = {key: replace(tier, share=shares[key]) for key, tier in TIERS.tiers.items()}
    return replace(TIERS, name=f"adaserve-{round(100 * coding)}", tiers=tiers)


def scale(times: float) -> TierSet:
    """Tiers in which coding's SLO is `times` its pace with a replica to itself."""
    coding: Tier = TIERS.tiers["coding"]
    if times == coding.slo.tbt_x:
        return TIERS
    tiers = {**TIERS.tiers, "coding": replace(coding, slo=replace(coding.slo, tbt_x=times))}
    return replace(TIERS, name=f"adaserve-{times:g}x", tiers=tiers)


def attained(run: Run) -> Value:
    return of(met, run)


def tokens_per_s(run: Run) -> Value:
    return of(lambda figures: figures.goodput_tokens_per_s, run)


Case = tuple[float, TierSet, Model]


def _of_rivals(case: Case) -> list[Run]:
    rate_rps, tiers, model = case
    return [run_of(system, rate_rps, tiers, model) for system in BASELINES]


def _ours(case: Case) -> Run:
    return run_of(OURS, *case)


def attainment(cases: Sequence[Case]) -> Value:
    """The greatest multiple, over these cases, of the best baseline's attainment."""
    return highest(
        *(over(attained(_ours(c)), highest(*map(attained, _of_rivals(c)))) for c in cases)
    )


def unattained(cases: Sequence[Case]) -> Value:
    """The greatest factor, over these cases, by which fewer requests miss than under the best
    baseline. A hundredth of ours counts as lost, so that no ratio divides by nothing.
    """
    return highest(
        *(
            over(
                lowest(*(of(violated, run) for run in _of_rivals(c))),
                combined(lambda percent: max(1.0, percent), of(violated, _ours(c))),
            )
            for c in cases
        )
    )


def goodput(cases: Sequence[Case]) -> Value:
    return highest(
        *(over(tokens_per_s(_ours(c)), highest(*map(tokens_per_s, _of_rivals(c)))) for c in cases)
    )


def _shifting(system: str) -> Value:
    """Figures 13 and 14: each category has its own peak."""
    seconds = 360.0
    bursts = ";".join(
        f"{tier}={swing([count / 30.0 for count in counts], seconds)}"
        for tier, counts in COUNTS.items()
    )
    return attained(replace(run_of(system, 1.0), duration_s=seconds, bursts=bursts))


RATES: list[Case] = [(rate, TIERS, LLAMA) for rate in LLAMA.rates_rps]
SHARES: list[Case] = [(4.0, share(coding), LLAMA) for coding in (0.3, 0.5, 0.7, 0.9)]
SCALES: list[Case] = [(4.0, scale(times), LLAMA) for times in (1.6, 1.4, 1.2, 1.0, 0.8, 0.6)]
QWENS: list[Case] = [(rate, TIERS, QWEN) for rate in QWEN.rates_rps]
TABLES = (
    Table(
        "adaserve-rate",
        ("attained, %", "", *SYSTEMS),
        (
            *(
                Row(
                    "figure8",
                    f"{rate:g} requests/s",
                    [attained(run_of(system, rate)) for system in SYSTEMS],
                )
                for rate in LLAMA.rates_rps
            ),
            Row(
                "figure14",
                "peaks apart",
                [*(_shifting(system) for system in (OURS, *BASELINES)), None],
                (83.6, 52.6, 65.6, 51.6, 47.8, 38.4, None),
            ),
        ),
        percent=True,
    ),
    Table(
        "adaserve-claims",
        ("over the best baseline", "", "rate", "share of coding", "SLO of coding", "rate, Qwen"),
        (
            Row(
                "figure8",
                "attainment, at most",
                [attainment(RATES), None, None, attainment(QWENS)],
                (2.1, None, None, 1.6),
            ),
            Row(
                "figure9",
                "goodput, at most",
                [goodput(RATES), goodput(SHARES), goodput(SCALES), goodput(QWENS)],
                (1.9, 1.3, 1.38, 1.7),
            ),
            Row(
                "figure10",
                "fewer unattained",
                [
                    unattained(RATES[-1:]),
                    unattained(SHARES),
                    unattained(SCALES),
                    unattained(QWENS[-1:]),
                ],
                (4.3, 4.3, 4.61, 3.2),
            ),
        ),
    ),
)
