"""SLOs-Serve Figures 1 and 9: DistServe beside it."""

from msgspec.structs import replace

from loadgen.lab.papers.experiment import DISTSERVE, Run
from loadgen.lab.papers.ratios import geometric_mean, highest, ratio
from loadgen.lab.papers.section import Results, Section, compare, figure
from loadgen.lab.papers.slos_serve import systems as runs
from loadgen.lab.papers.slos_serve.scenarios import FIRST_AT_2_RPS, FIRST_RPS
from loadgen.markdown import table

SPLITS = ((1, 1), (2, 1), (1, 2))  # section 6, "Baseline": prefill and decode GPUs
# The rates tried first, in requests/s for each GPU.
TRIED_RPS = {"chatbot": 3.0, "coder": 0.4, "summarizer": 2.0, "mixed": 2.5}
STRICT = "chatbot, 2 % violated"


def run_of(name: str, split: tuple[int, int], duration_s: float) -> Run:
    prefill, decode = split
    gpus = prefill + decode
    rps = gpus * TRIED_RPS[name]
    run = runs.scenario(runs.OURS, name, rps, duration_s, replicas=gpus)
    settings = {"prefill": str(prefill), "decode": str(decode)}
    return replace(run, policy=DISTSERVE, settings=settings)


def render(results: Results, duration_s: float) -> str:
    rows: list[tuple[str, ...]] = []
    over: dict[str, float | None] = {}
    cases = [*((name, name, 0.1, duration_s) for name in TRIED_RPS)]
    for case, name, violations, seconds in (*cases, (STRICT, "chatbot", 0.02, 2 * duration_s)):
        by_gpu: list[float | None] = []
        for split in SPLITS:
            rate = runs.capacity_rps(results, run_of(name, split, seconds), violations)
            by_gpu.append(None if rate is None else rate / sum(split))
        first = (FIRST_AT_2_RPS if case == STRICT else FIRST_RPS[name])[runs.OURS]
        alone = runs.scenario(runs.OURS, name, first, seconds)
        ours = runs.capacity_rps(results, alone, violations)
        over[case] = ratio(ours, highest(by_gpu))
        rows.append((case, *map(figure, (*by_gpu, ours, over[case]))))
    mean = geometric_mean([over[name] for name in TRIED_RPS])
    return "\n\n".join(
        (
            table(
                (
                    "requests/s for each GPU",
                    *(f"DistServe {prefill}:{decode}" for prefill, decode in SPLITS),
                    runs.OURS,
                    "over the best",
                ),
                rows,
            ),
            table(
                ("SLOs-Serve over DistServe", "published", "ours", "ratio", ""),
                [
                    ("the geometric mean of the scenarios", *compare(2.4, mean)),
                    ("ChatBot at 2 %", *compare(2.4, over[STRICT])),
                ],
            ),
        )
    )


SECTION = Section(
    name="slos-serve-distserve",
    title="Figures 1 and 9: DistServe",
    paper="""\
The best of one prefill GPU to one decode GPU, two to one, and one to two. Published: 2.4 times
DistServe in the geometric mean of six scenarios (section 1; section 6.1 has 2.6, "by average"), and
2.4 times in ChatBot with 2 % violated.""",
    hours=1 / 15,
    render=render,
    discussion="""\
DistServe is simulated apart from the policies, and simply ([simulator.md](simulator.md)): it is
never late for want of control, and knows output lengths. Its link, 300 GB/s, moves a prompt of 760
tokens in 1.3 ms, so it is not what limits it.

What differs: a GPU of one kind idles while the other is full. In Coder, whose prompts come in
bursts, one prefill GPU carries 1 request/s and two carry 4.5; in ChatBot a decode GPU has KV for
the whole outputs of a hundred requests, and two beside one prefill GPU do best. With the KV of 40
GB, as in the paper, they carry 3.14 requests/s for each GPU there, half of what SLOs-Serve does
(6.28). ToolLLM and Reasoning are left out: rounds and thinking are not simulated there. The rest of
the difference is not known; DistServe runs on an engine of its own, whose speed beside vLLM's the
paper does not state.
""",
)
