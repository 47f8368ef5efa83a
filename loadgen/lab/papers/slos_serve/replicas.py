"""SLOs-Serve Figure 13: capacity over the number of replicas."""

from collections.abc import Mapping

from loadgen.lab.papers.ratios import ratio
from loadgen.lab.papers.section import Results, Section, compare, figure
from loadgen.lab.papers.slos_serve import systems as runs
from loadgen.lab.papers.slos_serve.scenarios import FIRST_RPS
from loadgen.markdown import table

# Capacity over that of one replica, where the text states it.
PUBLISHED: Mapping[str, Mapping[int, float]] = {
    "chatbot": {2: 2.18, 3: 3.36, 4: 4.61},
    "toolllm": {4: 5.44},
    "coder": {4: 6.2},
}
# The rates tried first with several replicas, in requests/s per replica.
SEVERAL_RPS = {"chatbot": 8.6, "toolllm": 1.4, "coder": 5.2}


def render(results: Results, duration_s: float) -> str:
    rows = []
    for name, published in PUBLISHED.items():
        alone = runs.capacity_rps(
            results, runs.scenario(runs.OURS, name, FIRST_RPS[name][runs.OURS], duration_s)
        )
        rows.append((name, "1", figure(alone), "", "", "", ""))
        for replicas, published_ratio in published.items():
            together = runs.capacity_rps(
                results,
                runs.scenario(runs.OURS, name, replicas * SEVERAL_RPS[name], duration_s, replicas),
            )
            rows.append(
                (
                    name,
                    f"{replicas}",
                    figure(together),
                    *compare(published_ratio, ratio(together, alone)),
                )
            )
    return table(
        ("scenario", "replicas", "requests/s", "published", "ours, times one replica", "ratio", ""),
        rows,
    )


SECTION = Section(
    name="slos-serve-replicas",
    title="Figure 13: one to four replicas",
    paper="""\
OPT-7B. The paper claims that five scenarios scale linearly or better; the published figures here
are those in its text.""",
    hours=1 / 15,
    render=render,
    discussion="""\
What differs: bursts. In ToolLLM and Coder a single replica takes each burst alone, and the gaps
inside the burst stay as uneven at its low rate; among four replicas there is nearly always one with
room.
""",
)
