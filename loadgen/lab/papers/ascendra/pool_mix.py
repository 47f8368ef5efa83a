"""Ascendra Figures 9 (top) and 13: goodput by the mix of pools."""

from collections.abc import Mapping

from msgspec.structs import replace

from loadgen.lab.papers.ascendra import systems as runs
from loadgen.lab.papers.ascendra.systems import DROPS, FIRST_RPS, SARATHI, VLLM
from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.ratios import compare_lead, ratio
from loadgen.lab.papers.section import Results, Section, figure
from loadgen.markdown import table

# Mixes of LP and HP replicas, by their number.
MIXES = {3: ("2L1H", "1L2H"), 2: ("1L1H",)}
PUBLISHED = {VLLM: 1.191, SARATHI: 1.174}  # 2L1H over each baseline
# Ours and the baselines that it is compared with: whether they drop.
PAIRS = (("", ""), (DROPS, ""), (DROPS, DROPS))


def render(results: Results, duration_s: float) -> str:
    found = {
        replicas: {
            name: runs.goodput_rps(
                results, replace(run, replicas=replicas, rate_rps=FIRST_RPS * replicas)
            )
            for name, run in _systems(mixes, duration_s).items()
        }
        for replicas, mixes in MIXES.items()
    }
    rows = [
        (
            str(replicas),
            name,
            figure(rate),
            figure(ratio(rate, rates[VLLM])),
            figure(ratio(rate, runs.best_sarathi(rates))),
        )
        for replicas, rates in found.items()
        for name, rate in rates.items()
    ]
    three = found[3]
    claims = []
    for ours, theirs in PAIRS:
        rivals = {VLLM: three[VLLM + theirs], SARATHI: runs.best_sarathi(three, theirs)}
        for baseline, rate in rivals.items():
            cells = compare_lead(PUBLISHED[baseline], ratio(three[f"2L1H{ours}"], rate))
            claims.append((f"2L1H{ours}, over {baseline}{theirs}", *cells))
    headers = ("replicas", "", "goodput, requests/s", "over vLLM", "over Sarathi's best chunk")
    return "\n\n".join(
        (
            table(headers, rows),
            table(("ratio", "published", "ours", "ratio", ""), claims),
        )
    )


def _systems(mixes: tuple[str, ...], duration_s: float) -> Mapping[str, Run]:
    baselines = {**runs.baselines(duration_s), **runs.dropping_baselines(duration_s)}
    of_mix = {
        name: runs.run("ascendra", duration_s, **settings, **more)
        for mix in mixes
        for settings in [{} if mix == "2L1H" else {"subgroup": mix}]
        for name, more in {mix: {}, mix + DROPS: {"overload": "drop"}}.items()
    }
    return {**baselines, **of_mix}


SECTION = Section(
    name="ascendra-goodput",
    title="Figures 9 and 13: goodput by the mix of pools",
    paper="""\
Three replicas, two LP and one HP (2L1H), have 19.1 % more goodput than vLLM and 17.4 % more than
Sarathi with Mistral-7B on ShareGPT, and 15.4 % more with Llama-3.1-8B on LongBench. 2L1H does
better than 1L2H, and 1L1H (in the paper on LongBench) better than the baselines.""",
    hours=runs.HOURS,
    render=render,
    discussion="""\
What comes out: 2L1H comes before 1L2H, and 1L1H before the baselines, as claimed. 2L1H has 14 %
more goodput than the best of the baselines that do not drop. With dropping it has 11 % more than
those, and 9 % more than the best that drops; whether it drops or relegates is within the precision
of the search. The chunk of Sarathi, which the paper does not state, decides how far ahead Ascendra
is of it. Goodput at 90 % shows little of the difference, as the baselines fall steeply above that
rate.
""",
)
