"""The laboratory's runs that repeat Figures 9 and 12 of Ascendra's paper."""

from msgspec.structs import replace

from loadgen.lab.papers.run import Run
from loadgen.lab.papers.table import Row, Table
from loadgen.lab.papers.values import Value, capacity, highest, of, over
from loadgen.trials.figures import Figures
from shared.rules.tiers import load_tiers

SECONDS = 180.0
FIRST_RPS, REPLICAS = 8.7, 3
CHUNKS = ("512", "1024", "2048")  # of Sarathi: the paper does not state it
VLLM, OURS = "vLLM", "Ascendra"
SYSTEMS: dict[str, tuple[str, dict[str, str]]] = {
    VLLM: ("vllm", {"mode": "prefill_first"}),
    **{f"Sarathi, {chunk}": ("fcfs", {"chunk_tokens": chunk}) for chunk in CHUNKS},
    OURS: ("ascendra", {}),
}
SARATHIS = [name for name in SYSTEMS if name.startswith("Sarathi")]
DROPPING = {"ascendra": {"overload": "drop"}}  # the others: drop_late


def run_of(system: str, *, drops: bool = False, **more: str) -> Run:
    """Three replicas, at the rate that a search tries first."""
    policy, settings = SYSTEMS[system]
    router = {} if system == OURS else {"router": "round_robin"}
    dropping = DROPPING.get(policy, {"drop_late": "true"}) if drops else {}
    return Run(
        policy=policy,
        settings={**router, **settings, **dropping, **more},
        workload="sharegpt",
        rate_rps=FIRST_RPS,
        duration_s=SECONDS,
        tiers=load_tiers("ascendra-8b-sharegpt"),
        replicas=REPLICAS,
        profile="a100-llama3-8b",
        definition="mean-tpot",
    )


def goodput(run: Run) -> Value:
    return capacity(run, violations=0.1)


def _qwen(system: str) -> Value:
    tiers = load_tiers("ascendra-14b-sharegpt")
    return goodput(replace(run_of(system), profile="a100-qwen-14b", tiers=tiers, rate_rps=3.0))


def _in_time(system: str) -> Value:
    """Requests served within their SLO in ten minutes above capacity, where all drop."""

    def read(figures: Figures) -> float:
        return float(figures.offered - figures.violated)

    return of(read, replace(run_of(system, drops=True), duration_s=600.0, rate_rps=11.0))


GOODPUT = {system: goodput(run_of(system)) for system in SYSTEMS}
TABLES = (
    Table(
        "ascendra",
        ("", "", *SYSTEMS),
        (
            Row("figure9", "goodput, requests/s", list(GOODPUT.values())),
            Row(
                "figure9",
                "Ascendra over it",
                [
                    over(GOODPUT[OURS], GOODPUT[VLLM]),
                    None,
                    None,
                    over(GOODPUT[OURS], highest(*(GOODPUT[name] for name in SARATHIS))),
                    None,
                ],
                (1.191, None, None, 1.174, None),
            ),
            Row(
                "figure13", "two HP, one LP", [*[None] * 4, goodput(run_of(OURS, subgroup="1L2H"))]
            ),
            Row(
                "figure9-qwen",
                "little KV, requests/s",
                [_qwen(system) for system in SYSTEMS],
                (2.55, 2.8, 2.8, 2.8, 2.8),
            ),
            Row(
                "figure12",
                "Ascendra over it, overload, all drop",
                [*(over(_in_time(OURS), _in_time(name)) for name in (VLLM, *SARATHIS)), None],
                (1.74, 1.74, 1.74, 1.74, None),
            ),
        ),
    ),
)
