"""QoServe Figure 15b: the GPUs that two classes of TBT need, apart or together."""

import math

from msgspec.structs import replace

from loadgen.lab.papers.job import Capacity, Search
from loadgen.lab.papers.qoserve.systems import run
from loadgen.lab.papers.section import Results, Section, figure
from loadgen.markdown import table
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Slo

TOTAL_RPS = 50.0
FIRST_RPS = 3.0
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of Q1
TBT_S = {"Q1": 0.05, "Q2": 0.1}


def tiers(share: float) -> TierSet:
    shares = {"Q1": share, "Q2": 1 - share}
    return TierSet(
        name=f"tbt-{round(100 * share)}",
        default="Q1",
        tiers={
            name: Tier(slo=Slo(ttft_s=6.0, tbt_s=tbt_s), share=shares[name])
            for name, tbt_s in TBT_S.items()
        },
    )


def gpus(parts: list[tuple[float, Capacity | None]]) -> int | None:
    """The GPUs of several deployments; None: the capacity of one of them is unknown.

    `parts` has (load in requests/s, capacity of one replica) of each deployment.
    """
    needed = 0
    for load_rps, found in parts:
        if load_rps == 0:
            continue
        if found is None or found.rate_rps == 0:
            return None
        needed += math.ceil(load_rps / found.rate_rps)
    return needed


def render(results: Results, duration_s: float) -> str:
    apart = {}
    for share, (name, tbt_s) in zip((1.0, 0.0), TBT_S.items(), strict=True):
        # Every iteration has a fixed target: slack saved before is not spent (PolyServe takes its
        # chunks from Medha).
        alone = run(
            "fcfs", "azure-conv", FIRST_RPS, duration_s, chunk_tokens="2500", iteration_s=str(tbt_s)
        )
        apart[name] = results.capacity(Search(run=replace(alone, tiers=tiers(share))))
    rows, fewer = [], []
    for share in SHARES:
        shared = results.capacity(
            Search(
                run=replace(run("qoserve", "azure-conv", FIRST_RPS, duration_s), tiers=tiers(share))
            )
        )
        polyserve = gpus([(TOTAL_RPS * share, apart["Q1"]), (TOTAL_RPS * (1 - share), apart["Q2"])])
        qoserve = gpus([(TOTAL_RPS, shared)])
        rows.append(
            (
                f"{100 * share:g} %",
                figure(polyserve),
                figure(qoserve),
                figure(None if shared is None else shared.rate_rps),
            )
        )
        fewer.append(None if polyserve is None or qoserve is None else qoserve < polyserve)
    if None in fewer:
        verdict = "not run"
    elif all(fewer):
        verdict = "holds at every share"
    else:
        verdict = f"holds at {sum(map(bool, fewer))} of {len(fewer)} shares"
    rates = ", ".join(
        f"{name} {figure(None if found is None else found.rate_rps)} requests/s"
        for name, found in apart.items()
    )
    return (
        table(
            ("share of Q1", "PolyServe, GPUs", "QoServe, GPUs", "QoServe, requests/s per replica"),
            rows,
        )
        + f"\n\nGoodput of one PolyServe replica: {rates}. "
        f"The claim, that QoServe needs fewer GPUs at every share: {verdict}."
    )


SECTION = Section(
    name="figure15b",
    title="Figure 15b: PolyServe's separate deployments",
    paper="""\
50 requests/s of the conversation workload; TTFT 6 s; TBT 50 ms (Q1) or 100 ms (Q2). The number of
GPUs follows from the goodput of one replica. PolyServe has one deployment per class, each with the
chunk that its TBT allows. The figure is published as bars only.""",
    hours=0.5,
    render=render,
    discussion="""\
What differs: PolyServe needs no safety factor here, as its iterations are predicted exactly;
QoServe keeps its 1.2. Neither scales automatically nor moves requests, as in the paper.
""",
)
