"""SOLA Figures 1, 9 and 10: goodput from very tight to very loose SLOs, and the TTFT-TPOT plane."""

from msgspec.structs import replace

from loadgen.results.experiment import CONTEXT_TOKENS, SEED
from loadgen.results.ratios import ratio
from loadgen.results.section import Results, Section, figure, table, violated_percent
from loadgen.results.sola import systems as runs
from shared.tiers import Tier, TierSet, load_tiers
from shared.vocabulary import Slo

# SLOs over the latency of a request alone: very tight, tight, loose, very loose (sections 6.1 and
# 6.5).
TIMES = (5, 10, 15, 20)
PLANE_RPS = 10.0
PLANE = f"""\
![TTFT and mean TPOT of each request over its bounds, for vLLM-S, vLLM-D and SOLA](sola-plane.svg)

Each dot is a request of such a run; the box is the SLO. The picture is made by:

```sh
slackline compare --workload chatbot --rate {PLANE_RPS:g} --duration 180 \\
    --tiers sola-llama3-8b-loose --definition mean-tpot --context {CONTEXT_TOKENS} --seed {SEED} \\
    --policies vllm:max_num_batched_tokens=1024,vllm:mode=prefill_first,sola --plots DIR
```"""


def tiers_of(times: int) -> TierSet:
    """SLOs of `times` the latency alone. Table 3's tight SLOs of Llama3-8B are ten times it."""
    slo = load_tiers("sola-llama3-8b-tight").tiers["chat"].slo
    assert slo.ttft_s is not None and slo.tbt_s is not None
    scaled = Slo(ttft_s=times / 10 * slo.ttft_s, tbt_s=times / 10 * slo.tbt_s)
    return TierSet(
        name=f"sola-llama3-8b-{times}x", default="chat", tiers={"chat": Tier(slo=scaled)}
    )


def render(results: Results, duration_s: float) -> str:
    return "\n\n".join(
        (
            _goodput_by_slo(results, duration_s),
            (
                f"Figure 1 for Llama3-8B with its loose SLOs at {PLANE_RPS:g} requests/s "
                "(in the paper Llama3-70B at 4.6 requests/s: vLLM attains 45.5 %, SOLA 99.4 %):"
            ),
            _violations(results, duration_s),
            PLANE,
        )
    )


def _goodput_by_slo(results: Results, duration_s: float) -> str:
    goodput = {
        times: {
            name: runs.goodput_rps(
                results, runs.run(name, runs.CHAT_8B, tiers_of(times), duration_s)
            )
            for name in runs.SYSTEMS
        }
        for times in TIMES
    }
    rows = [
        (
            f"{times}x",
            *map(figure, rates.values()),
            figure(ratio(rates[runs.OURS], rates["vLLM-D"])),
        )
        for times, rates in goodput.items()
    ]
    headers = (f"{name}, requests/s" for name in runs.SYSTEMS)
    return table(("SLOs", *headers, "SOLA over vLLM-D"), rows)


def _violations(results: Results, duration_s: float) -> str:
    """Violated requests at PLANE_RPS, by what they missed."""
    tiers = load_tiers("sola-llama3-8b-loose")
    rows = []
    for name in runs.SYSTEMS:
        run = runs.run(name, runs.CHAT_8B, tiers, duration_s)
        figures = results.figures(replace(run, rate_rps=PLANE_RPS))
        missed_percent: list[float | None] = [None, None]  # by TTFT, by TPOT
        ttft_s: list[float | None] = [None, None]  # p50, p99
        if figures is not None:
            chat = figures.by_tier["chat"]
            missed = (chat.violations.ttft, chat.violations.tbt)
            missed_percent = [100 * violated / chat.offered for violated in missed]
            ttft_s = [chat.ttft_s.p50, chat.ttft_s.p99]
        percents = (violated_percent(figures), *missed_percent)
        rows.append(
            (name, *(figure(value, percent=True) for value in percents), *map(figure, ttft_s))
        )
    return table(("policy", "violated", "by TTFT", "by TPOT", "TTFT p50, s", "TTFT p99, s"), rows)


SECTION = Section(
    name="sola-slo",
    title="Figures 1, 9 and 10: from very tight to very loose, and the TTFT-TPOT plane",
    paper="""\
Llama3-8B with SLOs of 5 to 20 times the latency of a request alone; goodput at 90 %. The paper
claims that SOLA equals the best under the very tight SLOs and is far better under the very loose.
The figures are published as curves only.""",
    hours=runs.HOURS,
    render=render,
    discussion="""\
What comes out: SOLA leads under the loose and the very loose SLOs, by 6 to 13 %, and is far behind
prefill first under the very tight, for the reasons above. Beyond the limit SJF has the most
requests in time of the baselines, since it puts the longest prompts aside, as the p99 of its TTFT
shows.
""",
)
