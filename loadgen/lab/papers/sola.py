"""The laboratory's runs that repeat Figures 7 and 8 of SOLA: goodput by tight and loose SLOs."""

from collections.abc import Mapping
from typing import NamedTuple

from loadgen.lab.papers.run import MAX_SLOTS, Run
from loadgen.lab.papers.table import Row, Table
from loadgen.lab.papers.values import Value, capacity, geometric, over
from shared.rules.tiers import load_tiers

SECONDS = 180.0


class Baseline(NamedTuple):
    """A baseline of section 6.1, with SOLA's published goodput over it (Figure 8)."""

    settings: Mapping[str, str]
    at_90: float  # with 90 % of the requests attained
    at_99: float


class Benchmark(NamedTuple):
    """A row of Table 3, with our profile and workload for it."""

    model: str  # in the names of the tier sets
    profile: str
    workload: str
    first_rps: float  # the rate tried first
    times: float  # the factor on a run's length, so that runs have about equally many requests


CHUNK = "1024"
BASELINES = {
    "vLLM-S": Baseline({"max_num_batched_tokens": CHUNK}, 1.27, 1.11),
    "vLLM-D": Baseline({"mode": "prefill_first"}, 1.11, 1.06),
    "SJF": Baseline({"mode": "prefill_first", "order": "sjf"}, 1.08, 1.04),
}
CHATBOT, FIRST_TURNS = "chatbot", "sharegpt-first-turn"
BENCHMARKS = (
    Benchmark("llama3-8b", "a100-llama3-8b", CHATBOT, 9.0, 1),
    Benchmark("llama3-70b", "a100-llama3-70b-tp4", CHATBOT, 3.5, 2),
    Benchmark("llama3-8b", "a100-llama3-8b", FIRST_TURNS, 27.0, 0.5),
    Benchmark("llama3-70b", "a100-llama3-70b-tp4", FIRST_TURNS, 11.0, 1),
)


def run_of(baseline: str, benchmark: Benchmark, kind: str, *, capped: bool) -> Run:
    """A run of SOLA (`baseline` is empty), or of a baseline with at most 256 sequences, vLLM's
    default at that time, or with as many as its chunk has tokens or the KV holds.
    """
    settings = dict(BASELINES[baseline].settings) if baseline else {}
    if baseline and not capped:
        chunked = "max_num_batched_tokens" in settings
        settings["max_num_seqs"] = CHUNK if chunked else str(MAX_SLOTS)
    return Run(
        policy="vllm" if baseline else "sola",
        settings=settings,
        workload=benchmark.workload,
        rate_rps=benchmark.first_rps,
        duration_s=benchmark.times * SECONDS,
        tiers=load_tiers(f"sola-{benchmark.model}-{kind}"),
        profile=benchmark.profile,
        definition="mean-tpot",
    )


def lead(baseline: str, workload: str, violations: float, *, capped: bool) -> Value:
    """SOLA's goodput over the baseline's: the geometric mean of two models and two SLOs."""
    runs = [
        (run_of("", one, kind, capped=capped), run_of(baseline, one, kind, capped=capped))
        for one in BENCHMARKS
        if one.workload == workload
        for kind in ("tight", "loose")
    ]
    return geometric(
        *(
            over(capacity(ours, violations=violations), capacity(theirs, violations=violations))
            for ours, theirs in runs
        )
    )


def _row(attained: str, violations: float, name: str, published: float) -> Row:
    columns = [(w, capped) for w in (CHATBOT, FIRST_TURNS) for capped in (True, False)]
    values = [lead(name, w, violations, capped=capped) for w, capped in columns]
    return Row("figure8", f"{name}, {attained}", values, [published] * len(values))


TABLES = (
    Table(
        "sola",
        (
            "",
            "SOLA over",
            "`chatbot`, 256 sequences",
            "no cap",
            "first turns, 256 sequences",
            "no cap",
        ),
        (
            *(_row("90 % attained", 0.1, name, one.at_90) for name, one in BASELINES.items()),
            *(_row("99 %", 0.01, name, one.at_99) for name, one in BASELINES.items()),
        ),
    ),
)
