"""What SLOs-Serve's experiments have in common: scenarios, systems, and the search for what a
system carries.
"""

from collections.abc import Mapping

from loadgen.results.experiment import Run
from loadgen.results.job import Search
from loadgen.results.section import Lab
from loadgen.simulator.simulation import DRAFT
from shared.tiers import load_tiers

# the policy was looked at with seed 1 while it was written, and with 7 before its drafts were paid
# for in full
SEED = 11
PROFILE = "a100-llama2-7b"
SMALL_KV = "a100-llama3-8b"  # Reasoning's: a model with few KV heads
CONTEXT_TOKENS = 10_240  # all but the longest thoughts
VIOLATIONS = 0.1  # section 6, "Metric"
PRECISION = 0.05
STEP = 1.2  # the first rates below are near
BURSTY = ("coder", "toolllm")  # Table 2: arrivals of Azure's code trace
BURSTS, BURSTY_GAPS = "azure-code", "gamma:2"  # what stands for that trace: docs/simulator.md
UNDRAFTED = ("toolllm", "reasoning")  # Table 2: their models have no draft
LONGER = {"coder": 2.5, "toolllm": 5, "reasoning": 5}  # few requests a second, or minutes each

OURS = "SLOs-Serve"
VLLM = ("vLLM, prefill first", "vLLM, chunked")
SARATHI = "Sarathi"
BASELINES = (*VLLM, SARATHI)
# "The maximum size without violating the tightest decode SLO" (section 6, "Baseline"), of powers of
# two, beside 40 decodes of 900 tokens: 48 and 85 ms by our profile.
CHUNK_TOKENS = {"chatbot": "1024", "summarizer": "1024"}
TIGHT_CHUNK_TOKENS = "512"


def served(system: str, name: str) -> tuple[str, Mapping[str, str]]:
    """Policy and settings of a system in a scenario."""
    return {
        OURS: ("slos_serve", {}),
        VLLM[0]: ("vllm", {"mode": "prefill_first"}),
        VLLM[1]: ("vllm", {}),
        SARATHI: ("fcfs", {"chunk_tokens": CHUNK_TOKENS.get(name, TIGHT_CHUNK_TOKENS)}),
    }[system]


def scenario(
    system: str, name: str, rate_rps: float, duration_s: float, replicas: int = 1, **more: str
) -> Run:
    """`name`: of a workload of Table 2, judged by the tier set of that name. `more`: settings."""
    policy, settings = served(system, name)
    return Run(
        policy=policy,
        settings={**settings, **more},
        workload=name,
        rate_rps=rate_rps,
        duration_s=LONGER.get(name, 1) * duration_s,
        tiers=load_tiers(f"slos-serve-{name}"),
        replicas=replicas,
        profile=SMALL_KV if name == "reasoning" else PROFILE,
        definition="max-tpot-10",
        context_tokens=CONTEXT_TOKENS,
        arrivals=BURSTY_GAPS if name in BURSTY else "poisson",
        bursts=BURSTS if name in BURSTY else "",
        draft=0.0 if name in UNDRAFTED else DRAFT,
        seed=SEED,
    )


def carried(lab: Lab, run: Run, violations: float = VIOLATIONS) -> float | None:
    """Requests/s, of all replicas together; None: not found yet. `run.rate_rps` is tried first."""
    found = lab.capacity(Search(run=run, violations=violations, precision=PRECISION, step=STEP))
    return None if found is None else found.rate_rps
