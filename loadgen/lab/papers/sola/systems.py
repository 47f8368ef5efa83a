"""The benchmarks and systems of SOLA's experiments, and the search for their goodput."""

from collections.abc import Mapping
from typing import NamedTuple

from loadgen.lab.papers.experiment import MAX_SLOTS, Run
from loadgen.lab.papers.job import Search
from loadgen.lab.papers.section import Results
from shared.rules.tiers import TierSet

HOURS = 0.05  # of arrivals in each run
OURS = "SOLA"


class Baseline(NamedTuple):
    """A baseline of section 6.1, with SOLA's published goodput over it (Figure 8)."""

    settings: Mapping[str, str]
    at_90: float  # with 90 % of the requests attained
    at_99: float


BASELINES = {
    "vLLM-S": Baseline({"max_num_batched_tokens": "1024"}, 1.27, 1.11),
    "vLLM-D": Baseline({"mode": "prefill_first"}, 1.11, 1.06),
    "SJF": Baseline({"mode": "prefill_first", "order": "sjf"}, 1.08, 1.04),
}
SYSTEMS = (*BASELINES, OURS)

# The most sequences that a baseline runs at a time: vLLM's default, or as many as the KV holds (for
# vLLM-S as many as its chunk has tokens). SOLA sets its own number in each iteration.
CAPPED, UNCAPPED = "256", "no cap"
CAPS = (CAPPED, UNCAPPED)


class Benchmark(NamedTuple):
    """A row of Table 3, with our profile and workload for it."""

    model: str  # in the names of the tier sets
    profile: str
    workload: str
    first_rps: float  # the rate tried first
    chunk: str = "1024"  # of vLLM-S (section 6.1)
    times: float = 1  # runs are so many times as long; about as many requests in each


CHATBOT, FIRST_TURNS = "chatbot", "sharegpt-first-turn"
CHAT_8B = {
    CHATBOT: Benchmark("llama3-8b", "a100-llama3-8b", CHATBOT, 9.0),
    FIRST_TURNS: Benchmark("llama3-8b", "a100-llama3-8b", FIRST_TURNS, 27.0, times=0.5),
}
CHAT_70B = {
    CHATBOT: Benchmark("llama3-70b", "a100-llama3-70b-tp4", CHATBOT, 3.5, times=2),
    FIRST_TURNS: Benchmark("llama3-70b", "a100-llama3-70b-tp4", FIRST_TURNS, 11.0),
}


def run(
    system: str,
    benchmark: Benchmark,
    tiers: TierSet,
    duration_s: float,
    cap: str = CAPPED,
    **more: str,
) -> Run:
    """A run of SOLA or a baseline. `more` has further settings."""
    settings = {} if system == OURS else {**BASELINES[system].settings}
    chunked = "max_num_batched_tokens" in settings
    if chunked:
        settings["max_num_batched_tokens"] = benchmark.chunk
    if cap == UNCAPPED and system != OURS:
        settings["max_num_seqs"] = benchmark.chunk if chunked else str(MAX_SLOTS)
    return Run(
        policy="sola" if system == OURS else "vllm",
        settings={**settings, **more},
        workload=benchmark.workload,
        rate_rps=benchmark.first_rps,
        duration_s=benchmark.times * duration_s,
        tiers=tiers,
        profile=benchmark.profile,
        definition="mean-tpot",
    )


def goodput_rps(results: Results, run: Run, violations: float = 0.1) -> float | None:
    """The goodput; None: not found yet."""
    found = results.capacity(Search(run=run, violations=violations))
    return None if found is None else found.rate_rps


def each_goodput_rps(
    results: Results,
    benchmark: Benchmark,
    tiers: TierSet,
    duration_s: float,
    cap: str,
    violations: float = 0.1,
) -> dict[str, float | None]:
    """The goodput of every system."""
    return {
        name: goodput_rps(results, run(name, benchmark, tiers, duration_s, cap), violations)
        for name in SYSTEMS
    }
