"""The laboratory's runs that repeat QoServe's figures and tables (published for A100s)."""

from msgspec.structs import replace

from loadgen.lab.papers.run import Run
from loadgen.lab.papers.table import Row, Table
from loadgen.lab.papers.values import Value, capacity, important_violated, of, together, violated
from loadgen.trials.figures import Figures
from shared.rules.tiers import QOSERVE_3, Tier, TierSet
from shared.vocabulary import Slo

LABELS = {"fcfs": "Sarathi-FCFS", "edf": "Sarathi-EDF", "qoserve": "QoServe"}
# Section 3.6: alpha is 8 ms a token where the rate does not change, and follows the load where it
# does.
FIXED_ALPHA = {"alpha_low_s": "0.008", "alpha_high_s": "0.008"}
NO_ALPHA = {"alpha_low_s": "0", "alpha_high_s": "0"}
PARTS = {"eager_relegation": "false", "hybrid": "false"}
# The artifact's settings for Figure 8: no dynamic chunking, alpha twice as large.
PREFILL_NODE = {"dynamic_chunking": "false", "alpha_low_s": "0.016", "alpha_high_s": "0.016"}
OTHER_SLOS = TierSet(
    name="qoserve-other-slos",
    default="Q1",
    tiers={
        "Q1": Tier(slo=Slo(ttft_s=3.0, tbt_s=0.05), share=1 / 3),
        "Q2": Tier(slo=Slo(ttft_s=6.0, tbt_s=0.05), share=1 / 3),
        "Q3": Tier(slo=Slo(ttlt_s=1000.0), share=1 / 3),
    },
)
# The paper gives Figure 15a no SLO; this is Q1 of Table 3.
Q1_ALONE = TierSet(
    name="q1-alone", default="Q1", tiers={"Q1": Tier(slo=Slo(ttft_s=6.0, tbt_s=0.05), share=1.0)}
)
SILO_CHUNKS = {"Q1": "256", "Q2": "2048", "Q3": "2048"}  # section 4, baselines
SILO_RPS, SILO_HOURS = 35.0, 2.9


def run_of(policy: str, workload: str, rate_rps: float, hours: float, **settings: str) -> Run:
    fixed = FIXED_ALPHA if policy == "qoserve" else {}
    return Run(
        policy=policy,
        settings={"router": "round_robin", **fixed, **settings},
        workload=workload,
        rate_rps=rate_rps,
        duration_s=3600 * hours,
    )


def _goodput(
    name: str, what: str, workload: str, hours: float, published: tuple[float, float, float]
) -> Row:
    runs = (run_of(p, workload, r, hours) for p, r in zip(LABELS, published, strict=True))
    return Row(name, what, [capacity(run) for run in runs], published)


def _prefill_node(policy: str, rate_rps: float) -> Value:
    settings = PREFILL_NODE if policy == "qoserve" else {}
    run = run_of(policy, "azure-conv", rate_rps, 4, chunk_tokens="8192", **settings)
    return capacity(replace(run, first_token_only=True))


def _swinging(policy: str) -> Run:
    """Figure 12: 2 and 5 requests/s in turn; a fifth is unimportant. Alpha follows the load."""
    run = run_of(policy, "azure-code", 2.0, 4)
    return replace(run, settings={"router": "round_robin"}, bursts="900:1,900:2.5", important=0.8)


def _long(policy: str, rate_rps: float, **settings: str) -> Value:
    return capacity(
        replace(run_of(policy, "long-prompts", rate_rps, 2, **settings), tiers=Q1_ALONE)
    )


def _other(policy: str, rate_rps: float, **settings: str) -> Value:
    return capacity(
        replace(run_of(policy, "azure-conv", rate_rps, 1, **settings), tiers=OTHER_SLOS)
    )


def _silo(replicas: tuple[int, int, int]) -> list[Run]:
    """Each tier on replicas of its own, first come first served."""
    return [
        replace(
            run_of("fcfs", "azure-code", SILO_RPS, SILO_HOURS, chunk_tokens=SILO_CHUNKS[tier]),
            only=tier,
            replicas=count,
        )
        for tier, count in zip(QOSERVE_3.tiers, replicas, strict=True)
    ]


def _p99_of_q1(figures: Figures) -> float:
    return figures.by_tier["Q1"].ttft_s.p99 or 0.0


def _deployment(what: str, runs: list[Run], published: tuple[float, float]) -> Row:
    return Row("table4", what, [together(runs), of(_p99_of_q1, runs[0])], published)


def _part(what: str, policy: str, first: float, published: tuple[float, float], **off: str) -> Row:
    """A row of a policy's part. `first`: the rate tried first. Figure 7 has two of these, too."""
    run = run_of(policy, "azure-code", first, 4, **off)
    return Row("table5", what, [capacity(run), of(violated, replace(run, rate_rps=6.0))], published)


SHARED = replace(run_of("qoserve", "azure-code", SILO_RPS, SILO_HOURS), replicas=10)
MEDHA = _long("fcfs", 0.26, chunk_tokens="2500", iteration_s="0.05")
CHUNKS = _long("qoserve", 0.32, **PARTS)
TABLES = (
    Table(
        "qoserve",
        ("", "", *LABELS.values()),
        (
            _goodput("figure7", "code, requests/s", "azure-code", 4, (1.9, 2.9, 4.1)),
            _goodput("figure7", "conversations, requests/s", "azure-conv", 4, (2.9, 3.9, 4.7)),
            _goodput("figure7", "ShareGPT, requests/s", "sharegpt", 4, (1.3, 2.1, 2.3)),
            Row(
                "figure8",
                "prefill node, requests/s",
                [
                    _prefill_node("fcfs", 5.7),
                    _prefill_node("edf", 6.8),
                    _prefill_node("qoserve", 7.3),
                ],
                (5.7, 6.8, 7.3),
            ),
            Row(
                "other-slos",
                "alpha 0, requests/s",
                [None, _other("edf", 3.7), _other("qoserve", 5.0, **NO_ALPHA)],
                (None, 3.7, 5.0),
            ),
            Row(
                "figure15a",
                "long: Medha, QoServe's chunks",
                [MEDHA, None, CHUNKS],
                (0.26, None, 0.32),
            ),
            Row(
                "figure12",
                "violated, %",
                [of(violated, _swinging(policy)) for policy in LABELS],
                (81.88, 84.12, 8.64),
            ),
            Row(
                "figure12",
                "of the important, %",
                [of(important_violated, _swinging(policy)) for policy in LABELS],
                (81.96, 84.09, 0.0),
            ),
        ),
        percent=True,
    ),
    Table(
        "qoserve-parts",
        ("", "", "optimal load, requests/s", "violated at 6 requests/s, %"),
        (
            _part("EDF", "edf", 2.9, (2.75, 100.0)),
            _part("dynamic chunks", "qoserve", 3.3, (3.3, 74.0), **PARTS),
            _part("with relegation", "qoserve", 3.6, (3.6, 26.0), hybrid="false"),
            _part("with hybrid priority", "qoserve", 4.1, (3.65, 16.0)),
        ),
    ),
    Table(
        "qoserve-silos",
        ("", "", "violated, %", "p99 TTFT of Q1, s"),
        (
            _deployment("13 GPUs in silos (7, 3, 3)", _silo((7, 3, 3)), (0.24, 3.09)),
            _deployment("10 in silos (6, 2, 2)", _silo((6, 2, 2)), (60.4, 11.39)),
            _deployment("10 shared, QoServe", [SHARED], (0.0, 3.38)),
        ),
    ),
)
