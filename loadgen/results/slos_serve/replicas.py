"""SLOs-Serve Figure 13: capacity over replicas."""

from collections.abc import Mapping

from loadgen.results.ratios import ratio
from loadgen.results.section import Lab, Section, compare, figure, table
from loadgen.results.slos_serve import systems as runs
from loadgen.results.slos_serve.scenarios import FIRST_RPS

# Capacity over that of one replica, as far as the text has it.
PUBLISHED: Mapping[str, Mapping[int, float]] = {
    "chatbot": {2: 2.18, 3: 3.36, 4: 4.61},
    "toolllm": {4: 5.44},
    "coder": {4: 6.2},
}
SEVERAL_RPS = {"chatbot": 8.6, "toolllm": 1.4, "coder": 5.2}  # tried first, per replica


def body(lab: Lab, duration_s: float) -> str:
    rows = []
    for name, published in PUBLISHED.items():
        alone = runs.carried(
            lab, runs.scenario(runs.OURS, name, FIRST_RPS[name][runs.OURS], duration_s)
        )
        rows.append((name, "1", figure(alone), "", "", "", ""))
        for replicas, told in published.items():
            found = runs.carried(
                lab,
                runs.scenario(runs.OURS, name, replicas * SEVERAL_RPS[name], duration_s, replicas),
            )
            rows.append((name, f"{replicas}", figure(found), *compare(told, ratio(found, alone))))
    return table(
        ("scenario", "replicas", "requests/s", "published", "ours, times one replica", "ratio", ""),
        rows,
    )


SECTION = Section(
    name="slos-serve-replicas",
    title="Figure 13: one to four replicas",
    paper="OPT-7B. Five scenarios scale linearly or better; these are the figures in the text.",
    hours=1 / 15,
    body=body,
    notes="""\
What differs: bursts. With ToolLLM and Coder one replica is hit by each burst alone, and the gaps inside stay as uneven at its low rate;
among four there is nearly always one with room.
""",
)
