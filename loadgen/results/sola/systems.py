"""The benchmarks and systems of SOLA's experiments, and the search for their goodput."""

from collections.abc import Mapping
from typing import NamedTuple

from loadgen.results.experiment import Run
from loadgen.results.job import Search
from loadgen.results.section import Results
from shared.tiers import TierSet

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


class Benchmark(NamedTuple):
    """A row of Table 3, with our profile and workload for it."""

    model: str  # in the names of the tier sets
    profile: str
    workload: str
    first_rps: float  # the rate tried first
    chunk: str = "1024"  # of vLLM-S (section 6.1)
    times: int = 1  # runs are so many times longer, where fewer requests arrive in a second


CHAT_8B = Benchmark("llama3-8b", "a100-llama3-8b", "chatbot", 9.0)


def run(system: str, benchmark: Benchmark, tiers: TierSet, duration_s: float, **more: str) -> Run:
    """A run of SOLA or a baseline. `more` has further settings."""
    settings = {} if system == OURS else {**BASELINES[system].settings}
    if "max_num_batched_tokens" in settings:
        settings["max_num_batched_tokens"] = benchmark.chunk
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
