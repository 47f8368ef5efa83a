"""Loads whose KV is short."""

from collections.abc import Mapping

from msgspec.structs import replace

from loadgen.lab.papers.section import Results, Section
from loadgen.lab.papers.slackline.same_loads import load_of
from loadgen.lab.papers.slackline.systems import (
    OURS,
    SEEDS,
    other,
    ours,
    percents,
    percents_by_importance,
    spread,
)
from loadgen.markdown import table
from shared.policy.slackline.policy import Part

# Of each load: the share of its seconds in the matrix, and the tokens of KV of each replica.
LOADS: Mapping[str, tuple[float, int]] = {
    "SLOs-Serve, ChatBot": (1.0, 30_000),
    "SLOs-Serve, Mixed": (1.0, 30_000),
    "Ascendra": (0.5, 60_000),
    "QoServe, ShareGPT": (0.4, 40_000),
}
IMPORTANT = 0.2
UNEQUAL = f"""\
Where {100 * IMPORTANT:.0f} % of the requests are important: of these and of the others, in %, the
mean of the seeds with the least and the most of them; then where nobody gives up KV for them."""
BESIDE = ("slos_serve", "qoserve", "edf", "vllm")


def render(results: Results, duration_s: float) -> str:
    rows, important = [], []
    for name, (length, kv_tokens) in LOADS.items():
        run = replace(load_of(name, length * duration_s / 3600), kv_tokens=kv_tokens)
        runs = [ours(replace(run, settings={})), *(other(run, policy) for policy in BESIDE)]
        cells = [spread(percents(results, each, SEEDS)) for each in runs]
        rows.append((name, f"{run.rate_rps:g}", f"{kv_tokens:,}", *cells))
        unequal = replace(run, policy=OURS, settings={}, important=IMPORTANT)
        without = replace(unequal, settings={"without": Part.CLAIMS.value})
        found = [percents_by_importance(results, each, SEEDS) for each in (unequal, without)]
        known = [value for pair in found for value in pair or (None, None)]
        important.append((name, *map(spread, known)))
    head = ("load", "requests/s", "KV, tokens", *(f"`{policy}`" for policy in (OURS, *BESIDE)))
    kinds = ("load", "important", "others", "without: important", "without: others")
    return f"{table(head, rows)}\n\n{UNEQUAL}\n\n{table(kinds, important)}"


SECTION = Section(
    name="slackline-kv",
    title="Where KV is short",
    paper=f"""\
Loads of the matrix on replicas with little KV: requests whose SLO was met, in % of those offered,
the mean of {len(SEEDS)} seeds with the least and the most of them. The others have the settings of
the loads drawn at random.""",
    hours=1.0,
    render=render,
    discussion="""\
`slackline` is ahead on three of the four, by 10.5 to 12.6 points, and 0.4 behind `qoserve` on
ShareGPT. Before offers that would find no KV were declined, and drafts had blocks of their own, it
kept 62.4, 76.9, 80.5 and 96.5 %; before prefills that find no KV were told from others 56.4, 64.9,
56.1 and 91.3 ([slackline.md](slackline.md#kv)). The rules were chosen
with seeds 43 and 44 of these loads.

Of the important requests 97 to 100 % are kept in the mean (94.2 with the worst seed). That others
give up KV for them keeps 2.8 to 14.7 points more of the important ones, which are ten times as
important, and costs up to 10.8 points of the others.
""",
)
