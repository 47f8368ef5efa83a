"""The systems of Ascendra's experiments, and the search for their goodput."""

from collections.abc import Mapping

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.job import Search
from loadgen.lab.papers.ratios import highest
from loadgen.lab.papers.section import Results, violated_percent
from loadgen.trials.figures import Figures
from shared.rules.tiers import load_tiers

HOURS = 0.05  # of arrivals in each run
VIOLATIONS = 0.1  # section 8.2
FIRST_RPS = 2.9  # the rate per replica tried first
REPLICAS = 3
ROUND_ROBIN = {"router": "round_robin"}
VLLM, SARATHI, OURS = "vLLM", "Sarathi", "Ascendra"
CHUNKS = ("512", "1024", "2048")  # of Sarathi: the paper does not state it
SARATHIS = {f"{SARATHI}, chunk {chunk}": chunk for chunk in CHUNKS}
BASELINES = (VLLM, *SARATHIS)
DROPS = ", drops"  # after the name of a system that drops what waits past its deadline
TIERS = "ascendra-8b-sharegpt"


def run(policy: str, duration_s: float, **settings: str) -> Run:
    """A run on three replicas, at the rate that a search tries first."""
    return Run(
        policy=policy,
        settings=settings if policy == "ascendra" else {**ROUND_ROBIN, **settings},
        workload="sharegpt",
        rate_rps=REPLICAS * FIRST_RPS,
        duration_s=duration_s,
        tiers=load_tiers(TIERS),
        replicas=REPLICAS,
        profile="a100-llama3-8b",
        definition="mean-tpot",
    )


def baselines(duration_s: float) -> Mapping[str, Run]:
    return {
        VLLM: run("vllm", duration_s, mode="prefill_first"),
        **{name: run("fcfs", duration_s, chunk_tokens=chunk) for name, chunk in SARATHIS.items()},
    }


def dropping_baselines(duration_s: float) -> Mapping[str, Run]:
    """The baselines of section 8.6, which drop as Ascendra does."""
    return {
        VLLM + DROPS: run("vllm", duration_s, mode="prefill_first", drop_late="true"),
        **{
            name + DROPS: run("fcfs", duration_s, chunk_tokens=chunk, drop_late="true")
            for name, chunk in SARATHIS.items()
        },
    }


def ours(duration_s: float) -> Mapping[str, Run]:
    return {
        OURS: run("ascendra", duration_s),
        OURS + DROPS: run("ascendra", duration_s, overload="drop"),
    }


def goodput_rps(results: Results, run: Run) -> float | None:
    """The goodput of all replicas together; None: not found yet."""
    found = results.capacity(Search(run=run, violations=VIOLATIONS))
    return None if found is None else found.rate_rps


def best_sarathi(by_system: Mapping[str, float | None], suffix: str = "") -> float | None:
    """Sarathi's highest figure, over its chunks."""
    return highest([by_system[name + suffix] for name in SARATHIS])


def attained_percent(figures: Figures | None) -> float | None:
    violated = violated_percent(figures)
    return None if violated is None else 100 - violated
