"""SOLA Figures 7 and 8: goodput under tight and loose SLOs."""

from loadgen.results.ratios import compare_lead, geometric_mean, ratio
from loadgen.results.section import Results, Section, figure, table
from loadgen.results.sola import systems as runs
from shared.tiers import load_tiers

BENCHMARKS = {
    "Llama3-8B, chat": runs.CHAT_8B,
    "Llama3-70B on four, chat": runs.Benchmark(
        "llama3-70b", "a100-llama3-70b-tp4", "chatbot", 3.5, times=2
    ),
    "Llama-2-7B, long (placeholder)": runs.Benchmark(
        "vicuna1.5-7b-16k", "a100-llama2-7b", "longbench-placeholder", 5.4, chunk="4096"
    ),
}
VIOLATIONS = {"90 %": 0.1, "99 %": 0.01}


def render(results: Results, duration_s: float) -> str:
    rates, ratios = [], []
    for attained, violations in VIOLATIONS.items():
        over: dict[str, list[float | None]] = {name: [] for name in runs.BASELINES}
        for title, benchmark in BENCHMARKS.items():
            for kind in ("tight", "loose"):
                tiers = load_tiers(f"sola-{benchmark.model}-{kind}")
                goodput = {
                    name: runs.goodput_rps(
                        results, runs.run(name, benchmark, tiers, duration_s), violations
                    )
                    for name in runs.SYSTEMS
                }
                rates.append((attained, title, kind, *map(figure, goodput.values())))
                if "placeholder" not in benchmark.workload:
                    for name, of_baseline in over.items():
                        of_baseline.append(ratio(goodput[runs.OURS], goodput[name]))
        for name, baseline in runs.BASELINES.items():
            published = baseline.at_90 if violations == 0.1 else baseline.at_99
            cells = compare_lead(published, geometric_mean(over[name]))
            ratios.append((attained, name, *cells))
    headers = ("attained", "model and workload", "SLOs")
    return "\n\n".join(
        (
            table((*headers, *(f"{name}, requests/s" for name in runs.SYSTEMS)), rates),
            (
                "SOLA's goodput over that of each baseline: the geometric mean of the rows above "
                "without the placeholder:"
            ),
            table(("attained", "over", "published", "ours", "ratio", ""), ratios),
        )
    )


SECTION = Section(
    name="sola-goodput",
    title="Figures 7 and 8: goodput under tight and loose SLOs",
    paper="""\
Five models, the SLOs of Table 3, 2,000 requests of ShareGPT or 832 of LongBench. Goodput is the
highest rate at which 90 % or 99 % of the requests are attained. The published values are averages
over all models.""",
    hours=runs.HOURS,
    render=render,
    discussion="""\
What comes out: SOLA carries a tenth more than SplitFuse. It leads over vLLM-D and SJF only under
the loose SLOs of Llama3-8B.

Why: in the paper's Figure 1 vLLM-D fails the TPOT of a third of the requests. With these lengths it
fails almost none, and TTFT is the limit (see the table of Figure 1 below). A mean prompt of
`chatbot`, 763 tokens, takes 57 ms alone on Llama3-8B and 161 ms on Llama3-70B. The tight TTFTs are
ten and five times 40 and 100 ms. Where TTFT is the limit, a policy that lets prompts wait loses.
SOLA as printed lets them wait in two ways. Eq. 1 holds a prefill back for requests with few output
tokens so far, and longer the more time the prefill takes relative to the TPOT: on Llama3-70B it
takes 161 of 200 ms. Eq. 2 lets each prompt wait until it must begin on its own; of two prompts that
are due together, one is then late.

What differs: a run has 360 to 2,000 requests, the fewest on Llama3-70B, where 1 % of them is four
requests.
""",
)
