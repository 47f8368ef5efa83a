"""The loads of the matrix: the workloads, tiers and definitions of all five papers."""

from collections.abc import Sequence
from typing import NamedTuple

from loadgen.lab.papers.experiment import BURSTS, BURSTY_GAPS, Run
from loadgen.lab.papers.experiment import PROFILE as QOSERVE_PROFILE
from loadgen.lab.papers.job import VIOLATIONS
from loadgen.lab.papers.matrix.settings import Settings, settings_of
from shared.perf.draft import DRAFT
from shared.rules.tiers import load_tiers

REPLICAS = 2  # the fewest that have Ascendra's pools, and a next replica for SLOs-Serve
PROFILE = "a100-llama3-8b"


class Load(NamedTuple):
    """A load, as a run without a policy.

    `run.duration_s` is that of `--hours 1`. `run.rate_rps` is the rate of all replicas that the
    search tries first. With `figure7` there is no search: the rate is QOSERVE_TIMES the capacity
    that Figure 7 found for one QoServe replica, times REPLICAS.
    """

    name: str
    run: Run
    violations: float = 0.1
    figure7: bool = False

    def settings_of(self, policy: str) -> Sequence[Settings]:
        """The setting that the policy's paper prints, then the others that may be its best."""
        return settings_of(policy, drafts=bool(self.run.draft))


def _load(
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
        policy="",
        workload=workload,
        rate_rps=rate_rps,
        duration_s=duration_s,
        tiers=load_tiers(tiers),
        replicas=REPLICAS,
        profile=profile,
        definition=definition,
        arrivals=BURSTY_GAPS if bursty else "poisson",
        bursts=BURSTS if bursty else "",
        draft=draft,
        wait_s=wait_s,
    )


LOADS = (
    *(
        Load(
            f"QoServe, {name}",
            _load(workload, "qoserve-3", 0.0, 600, "deadline", profile=QOSERVE_PROFILE, draft=0.0),
            VIOLATIONS,
            figure7=True,
        )
        for workload, name in {
            "azure-code": "code",
            "azure-conv": "conversations",
            "sharegpt": "ShareGPT",
        }.items()
    ),
    Load("SLOs-Serve, ChatBot", _load("chatbot", "slos-serve-chatbot", 18.5, 120, "max-tpot-10")),
    Load(
        "SLOs-Serve, Coder",
        _load("coder", "slos-serve-coder", 8.5, 300, "max-tpot-10", bursty=True),
    ),
    Load(
        "SLOs-Serve, Summarizer",
        _load("summarizer", "slos-serve-summarizer", 12.6, 150, "max-tpot-10"),
    ),
    Load("SLOs-Serve, Mixed", _load("mixed", "slos-serve-mixed", 17.0, 120, "max-tpot-10")),
    Load(
        "SLOs-Serve, ToolLLM",
        _load("toolllm", "slos-serve-toolllm", 2.6, 300, "max-tpot-10", bursty=True, draft=0.0),
    ),
    Load(
        "SLOs-Serve, Reasoning",
        _load("reasoning", "slos-serve-reasoning", 0.65, 1200, "max-tpot-10", draft=0.0),
    ),
    Load("SOLA, tight", _load("chatbot", "sola-llama3-8b-tight", 20.0, 120, "mean-tpot")),
    # First tokens have no deadline there: with enough time at the end, a policy that holds requests
    # back long enough violates none at any rate.
    Load(
        "AdaServe", _load("adaserve-placeholder", "adaserve-3", 30.0, 100, "mean-tpot", wait_s=20.0)
    ),
    Load("Ascendra", _load("sharegpt", "ascendra-8b-sharegpt", 5.5, 240, "mean-tpot")),
)
