"""SLOs-Serve Figure 9: the capacity in six scenarios, and that of ChatBot with 2 % violated."""

from collections.abc import Mapping

from loadgen.lab.papers.ratios import geometric_mean, highest, ratio
from loadgen.lab.papers.section import Results, Section, compare, figure
from loadgen.lab.papers.slos_serve import systems as runs
from loadgen.markdown import table

# The rates tried first, in requests/s (ToolLLM: sessions/s).
FIRST_RPS: Mapping[str, Mapping[str, float]] = {
    "chatbot": {runs.OURS: 7.8, "vLLM, prefill first": 4.8, "vLLM, chunked": 4.8, "Sarathi": 5.0},
    "coder": {runs.OURS: 3.7, "vLLM, prefill first": 0.2, "vLLM, chunked": 0.2, "Sarathi": 0.6},
    "summarizer": {
        runs.OURS: 4.8,
        "vLLM, prefill first": 3.3,
        "vLLM, chunked": 3.3,
        "Sarathi": 3.3,
    },
    "mixed": {runs.OURS: 7.4, "vLLM, prefill first": 4.0, "vLLM, chunked": 4.3, "Sarathi": 4.1},
    "toolllm": {
        runs.OURS: 0.5,
        "vLLM, prefill first": 0.09,
        "vLLM, chunked": 0.09,
        "Sarathi": 0.14,
    },
    "reasoning": {
        runs.OURS: 0.28,
        "vLLM, prefill first": 0.28,
        "vLLM, chunked": 0.28,
        "Sarathi": 0.28,
    },
}
# Beyond the paper, where first tokens are due within an iteration or two.
SIT_OUT = {"sit_out": "true"}
SIT_OUT_RPS = 0.4
FIRST_AT_2_RPS = {runs.OURS: 5.6, "vLLM, prefill first": 3.1, "vLLM, chunked": 3.1, "Sarathi": 2.9}


def render(results: Results, duration_s: float) -> str:
    rows: list[tuple[str, ...]] = []
    over_best: list[float | None] = []
    over_vllm: list[float | None] = []
    over_sarathi: list[float | None] = []
    for name, first in FIRST_RPS.items():
        capacities = {
            system: runs.capacity_rps(results, runs.scenario(system, name, rps, duration_s))
            for system, rps in first.items()
        }
        vllm, ours = highest([capacities[system] for system in runs.VLLM]), capacities[runs.OURS]
        over_best.append(ratio(ours, highest([capacities[system] for system in runs.BASELINES])))
        over_vllm.append(ratio(ours, vllm))
        over_sarathi.append(ratio(ours, capacities[runs.SARATHI]))
        rows.append(
            (
                name,
                *(figure(capacities[system]) for system in (*runs.BASELINES, runs.OURS)),
                figure(over_best[-1]),
            )
        )
        if name == "reasoning":
            sitting = runs.scenario(runs.OURS, name, SIT_OUT_RPS, duration_s, 1, **SIT_OUT)
            rate = runs.capacity_rps(results, sitting)
            rows.append((f"{name}, `sit_out=true`", "", "", "", figure(rate), ""))
    claims = (
        ("the better of both", 2.2, over_best),
        ("vLLM", 1.76, over_vllm),
        ("Sarathi", 1.94, over_sarathi),
    )
    return "\n\n".join(
        (
            table(("requests/s", *runs.BASELINES, runs.OURS, "over the best"), rows),
            "The geometric means of the six (vLLM: its better mode in each):",
            table(
                ("SLOs-Serve over", "published", "ours", "ratio", ""),
                [
                    (baseline, *compare(published, geometric_mean(ratios)))
                    for baseline, published, ratios in claims
                ],
            ),
        )
    )


def render_strict(results: Results, duration_s: float) -> str:
    capacities = {
        system: runs.capacity_rps(
            results, runs.scenario(system, "chatbot", rps, 2 * duration_s), violations=0.02
        )
        for system, rps in FIRST_AT_2_RPS.items()
    }
    ours, vllm = capacities[runs.OURS], highest([capacities[system] for system in runs.VLLM])
    rows = [
        ("vLLM", figure(vllm), *compare(1.91, ratio(ours, vllm))),
        (
            "Sarathi",
            figure(capacities[runs.SARATHI]),
            *compare(2.19, ratio(ours, capacities[runs.SARATHI])),
        ),
    ]
    return f"SLOs-Serve carries {figure(ours)} requests/s.\n\n" + table(
        ("SLOs-Serve over", "its capacity, requests/s", "published", "ours", "ratio", ""), rows
    )


SECTION = Section(
    name="slos-serve-capacity",
    title="Figures 1 and 9: capacity in six scenarios",
    paper="""\
Capacity is the highest rate per GPU at which at most a tenth of the requests are violated.
Published over the better of vLLM and Sarathi: 2.2 in the geometric mean; over each of them, 1.76
(vLLM) and 1.94 (Sarathi). Single scenarios are published as curves, with these figures in the text:
ChatBot 1.41 to 1.70, Summarizer 1.14 to 1.17, Coder up to 2.1, ToolLLM up to 1.90,
Reasoning 2.4.""",
    hours=1 / 15,
    render=render,
    discussion="""\
What differs: 2.2 over the better of both cannot be a mean over the same runs as 1.76 and 1.94.
Those are the ratios over each of them, which could only be larger. Here bursts decide. Under bursts
SLOs-Serve carries 3 to 6 times as much, since it declines a few requests and so saves the rest;
under Poisson arrivals it carries 1.3 to 1.5 times as much, most of it by drafts (Figure 14). At a
lower rate the gaps inside the bursts stay as uneven. At the rates that the baselines carry of Coder
and ToolLLM, a run has some hundred requests, and bursts hit them hardest: those ratios are rough.
Violations at one rate are steadier: at 2.1 requests/s of Coder SLOs-Serve violates 2.2 %, Sarathi
24 and vLLM 34 to 36; at 0.4 sessions/s of ToolLLM SLOs-Serve violates 5.3 %, Sarathi 15 and vLLM 15
to 17.

In ChatBot and Reasoning first tokens are due too soon for batches with decodes. By our profiles a
short prompt alone takes 14 ms, so its first token is due after 71 ms (ChatBot, 5x) or 42 ms
(Reasoning, 3x), while a batch of ChatBot may take 100 ms; in the paper "each batch requires at
least 25 milliseconds". In ChatBot at 6.9 requests/s SLOs-Serve declines 39 % of the shortest tenth
of the prompts, and 3 % of the longest quarter. In Reasoning vLLM prefills a prompt alone, which
takes 14 ms, and is in time.

What was tried: one TTFT for all requests. With 0.6 s in ChatBot SLOs-Serve violates 5.9 % at 7.2
requests/s (14 % without drafts), and the best baseline 20 % at 5.6. With 0.15 s in Reasoning
SLOs-Serve violates nothing at 0.35 and 14 % at 0.45, where Sarathi and vLLM with chunks violate
nothing. KV limits it there: an accepted request has room for its whole output (section 3.2.1), here
5,500 tokens of 426,788, while vLLM accepts every request that fits at the moment. The paper's model
of 1.5B has room for many more.

With `sit_out=true`, beyond the paper, decodes that are early wait while a prompt runs alone:
Reasoning carries 0.4 requests/s instead of 0.293, 0.91 of vLLM's, and the mean over the better of
both becomes 1.87 (with the published 2.4 in that row it would be 2.2). At 0.35 requests/s 0.2 % are
violated (19 without). The rest is that no decode waits longer than its TPOT, so that each 50 ms
have 25 for prompts, while vLLM lets decodes wait for several prompts and is late only where ten
tokens together are. Why the paper has 2.4 is not known.
""",
)
STRICT = Section(
    name="slos-serve-strict",
    title="Section 6.1: ChatBot with at most 2 % violated",
    paper="""\
The paper claims 1.91 times vLLM's capacity and 2.19 times Sarathi's; DistServe is below.""",
    hours=1 / 15,
    render=render_strict,
    discussion="""\
What differs: the same as above. At 2 % hardly any request may be declined, so only the gain of
batches of the right length and of drafts is left. What was tried: without drafts SLOs-Serve
violates 1.3 % at 4.4 requests/s and 2.7 % at 5; with drafts by the mean it violates 1.4 and 2.2 %.
""",
)
