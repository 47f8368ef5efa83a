"""The laboratory's loads on which `slackline` is compared with ten other policies: those of the
policies' five papers on two A100s, and paces that can hardly be kept.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loadgen.lab.papers.run import BURSTS, BURSTY_GAPS, Run
from loadgen.lab.papers.run import PROFILE as QOSERVE_PROFILE
from shared.perf.draft import DRAFT
from shared.rules.tiers import Tier, TierSet, load_tiers
from shared.vocabulary import Definition, Slo

Settings = Mapping[str, str]
OURS = "slackline"
PROFILE = "a100-llama3-8b"
FIXED = ("fcfs", "edf", "sjf", "srpf")  # Sarathi's orders
CHUNKS = ("256", "512", "1024")  # theirs
# The settings of `qoserve` that suit loads of short prompts with tight paces best.
FIXED_CHUNK = {"dynamic_chunking": "false", "chunk_tokens": "512"}
PREFILL_FIRST = {"mode": "prefill_first"}
# The settings of each policy: those that its paper prints, then others that may be its best.
WITHOUT_DRAFT: Mapping[str, Sequence[Settings]] = {
    **{order: [{"chunk_tokens": tokens} for tokens in CHUNKS] for order in FIXED},
    "slos_serve": ({},),
    "qoserve": ({}, {"alpha_low_s": "0.008"}, FIXED_CHUNK),
    "sola": ({}, {"max_batch_tokens": "1024"}),
    "adaserve": ({},),
    "ascendra": ({}, {"overload": "drop"}),
    "vllm": ({}, {"max_num_batched_tokens": "512"}, PREFILL_FIRST),
}
WITH_DRAFT: Mapping[str, Sequence[Settings]] = {
    **WITHOUT_DRAFT,
    "slos_serve": ({"speculate": "paper"}, {}),
    "adaserve": ({"depth_min": "4"}, {}),
    "vllm": (*WITHOUT_DRAFT["vllm"], {"spec_tokens": "4"}),
}
# The settings of each policy that suit most loads; used for every load.
OTHERS: Mapping[str, Settings] = {
    **{order: {"chunk_tokens": "512"} for order in FIXED},
    "slos_serve": {},
    "qoserve": {"alpha_low_s": "0.008"},
    "sola": {"max_batch_tokens": "1024"},
    "adaserve": {},
    "ascendra": {},
    "vllm": {"max_num_batched_tokens": "512"},
}


def run_of(
    workload: str,
    tiers: str,
    rate_rps: float,
    duration_s: float,
    definition: str,
    *,
    profile: str = PROFILE,
    bursty: bool = False,
    draft: float = DRAFT,
    wait_s: float | None = None,
) -> Run:
    return Run(
        policy=OURS,
        workload=workload,
        rate_rps=rate_rps,
        duration_s=duration_s,
        tiers=load_tiers(tiers),
        replicas=2,
        profile=profile,
        definition=definition,
        arrivals=BURSTY_GAPS if bursty else "poisson",
        bursts=BURSTS if bursty else "",
        draft=draft,
        wait_s=wait_s,
    )


def _qoserve(workload: str, rate_rps: float) -> Run:
    return run_of(
        workload, "qoserve-3", rate_rps, 300, "deadline", profile=QOSERVE_PROFILE, draft=0.0
    )


def _slos_serve(name: str, rate_rps: float, seconds: float, draft: float = DRAFT) -> Run:
    bursty = name in ("coder", "toolllm")
    return run_of(
        name, f"slos-serve-{name}", rate_rps, seconds, "max-tpot-10", bursty=bursty, draft=draft
    )


# Rates are those at which the best of the ten met 90 % with seed 7 (2026-11-22), but for QoServe's:
# half as much again as QoServe carries for four hours.
LOADS: Mapping[str, Run] = {
    "QoServe, code": _qoserve("azure-code", 11.34),
    "QoServe, conversations": _qoserve("azure-conv", 13.0),
    "QoServe, ShareGPT": _qoserve("sharegpt", 5.985),
    "ChatBot": _slos_serve("chatbot", 21.3, 60),
    "Coder": _slos_serve("coder", 10.8, 150),
    "Summarizer": _slos_serve("summarizer", 13.9, 75),
    "Mixed": _slos_serve("mixed", 18.7, 60),
    "ToolLLM": _slos_serve("toolllm", 3.0, 150, draft=0.0),
    "Reasoning": _slos_serve("reasoning", 0.865, 600, draft=0.0),
    "SOLA, tight": run_of("chatbot", "sola-llama3-8b-tight", 23.1, 60, "mean-tpot"),
    # First tokens have no deadline there: with enough time at the end, a policy that holds requests
    # back long enough violates none at any rate.
    "AdaServe": run_of("adaserve-placeholder", "adaserve-3", 26.6, 50, "mean-tpot", wait_s=20.0),
    "Ascendra": run_of("sharegpt", "ascendra-8b-sharegpt", 7.68, 120, "mean-tpot"),
}
# ChatBot on one A100, where a pass of one decode takes 12.3 ms: the shares of the paces, in ms.
HARD_PACES: Mapping[str, Mapping[float, float]] = {
    "all 12 ms": {12: 1.0},
    "12, 20 and 50 ms alike": {12: 1.0, 20: 1.0, 50: 1.0},
    "a tenth 12 ms, the others 50": {12: 0.1, 50: 0.9},
}


def load_of(name: str, hours: float, times: float = 1.0) -> Run:
    """A load at `times` its rate, with `hours` of arrivals."""
    run = LOADS[name]
    return replace(
        run,
        rate_rps=float(f"{run.rate_rps * times:.4g}"),
        duration_s=round(run.duration_s * hours, 1),
    )


def hard_paces(shares: Mapping[float, float], definition: Definition, duration_s: float) -> Run:
    tiers = {
        f"{pace_ms:g}ms": Tier(slo=Slo(ttft_s=1.0, tbt_s=pace_ms / 1e3), share=share)
        for pace_ms, share in shares.items()
    }
    return Run(
        policy=OURS,
        workload="chatbot",
        rate_rps=8.0,
        duration_s=duration_s,
        tiers=TierSet(name="hard-paces", default=next(iter(tiers)), tiers=tiers),
        profile=PROFILE,
        definition=definition.value,
    )


def under(run: Run, policy: str, settings: Settings | None = None) -> Run:
    """The run under another policy, with the setting that suits most loads if none is given."""
    chosen = OTHERS.get(policy, {}) if settings is None else settings
    return replace(run, policy=policy, settings=dict(chosen))


def settings_of(run: Run) -> Mapping[str, Sequence[Settings]]:
    """The settings that each of the ten other policies may have on this load."""
    return WITH_DRAFT if run.draft else WITHOUT_DRAFT
