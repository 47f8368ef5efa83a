"""What docs/results.md has of SLOs-Serve, and what its experiments have in common."""

from loadgen.results.run import SEED, Run
from loadgen.results.section import Part
from shared.drive.virtual import ACCEPTANCE, DRAFT
from shared.tiers import load_tiers

PROFILE = "a100-llama2-7b"
CONTEXT_TOKENS = 10_240  # all but the longest thoughts
VIOLATIONS = 0.1  # section 6, "Metric"
BURSTY = ("coder", "toolllm")  # Table 2: arrivals of Azure's code trace
UNDRAFTED = ("toolllm", "reasoning")  # Table 2: their models have no draft


def scenario(name: str, policy: str, rate_rps: float, duration_s: float, **settings: str) -> Run:
    """`name`: of a workload of Table 2, judged by the tier set of that name; on one replica."""
    return Run(
        policy=policy,
        settings=settings,
        workload=name,
        rate_rps=rate_rps,
        duration_s=duration_s,
        tiers=load_tiers(f"slos-serve-{name}"),
        profile=PROFILE,
        definition="max-tpot-10",
        context_tokens=CONTEXT_TOKENS,
        arrivals="gamma:4" if name in BURSTY else "poisson",
        bursts="azure-code" if name in BURSTY else "",
        draft=0.0 if name in UNDRAFTED else DRAFT,
    )


PART = Part(
    name="slos-serve",
    title="SLOs-Serve",
    head=f"""\
- **GPU**: the profile `{PROFILE}`, a model with as many parameters, layers and KV heads as OPT-6.7B, on an A100 of 80 GB. The paper has
  OPT-7B, 13B and 30B on A100s of 40 GB, where less KV fits.
- **Draft**: an iteration of it takes {100 * DRAFT:g} % of the target's, and {100 * ACCEPTANCE:g} % of its first tokens are accepted;
  the paper has OPT-125m and does not say how often it is right. Reasoning and ToolLLM run without a draft there, and here.
- **Workloads** have the figures of Table 4 (`loadgen/workload.py`), seed {SEED}. **Arrivals** are Poisson; for Coder and ToolLLM, which
  replay Azure's bursty code trace there, bursts of that trace's minutes with Gamma gaps inside ([simulator.md](simulator.md)).
- **A request is violated** by definition `max-tpot-10` over all that were offered; **capacity** is the rate at which a tenth are.
""",
    sections=(),
)
