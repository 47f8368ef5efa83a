"""Paces that can hardly be kept: hardly longer than a pass of a few decodes."""

from collections.abc import Mapping, Sequence

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.section import MISSING, Results, Section
from loadgen.lab.papers.slackline.systems import OTHERS, OURS, SEEDS, lead, other, percents, spread
from loadgen.markdown import table
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo

PROFILE = "a100-llama3-8b"
TTFT_S = 1.0
RATE_RPS = 8.0
# The shares of the paces, which are in ms.
PACES: Mapping[str, Mapping[float, float]] = {
    "all 12 ms": {12: 1.0},
    "12, 20 and 50 ms alike": {12: 1.0, 20: 1.0, 50: 1.0},
    "a tenth 12 ms, the others 50": {12: 0.1, 50: 0.9},
}
DEFINITIONS = (Definition.DEADLINE, Definition.MEAN_TPOT, Definition.MAX_TPOT_10)


def render(results: Results, duration_s: float) -> str:
    return table(
        ("paces", "definition", "`slackline`", "the best of the ten", "", "points ahead"),
        [
            _row(results, name, run_of(shares, definition, duration_s))
            for name, shares in PACES.items()
            for definition in DEFINITIONS
        ],
    )


def run_of(shares: Mapping[float, float], definition: Definition, duration_s: float) -> Run:
    tiers = {
        f"{pace_ms:g}ms": Tier(slo=Slo(ttft_s=TTFT_S, tbt_s=pace_ms / 1e3), share=share)
        for pace_ms, share in shares.items()
    }
    return Run(
        policy=OURS,
        workload="chatbot",
        rate_rps=RATE_RPS,
        duration_s=duration_s,
        tiers=TierSet(name="hard-paces", default=next(iter(tiers)), tiers=tiers),
        profile=PROFILE,
        definition=definition.value,
    )


def _row(results: Results, name: str, run: Run) -> Sequence[str]:
    mine = percents(results, run, SEEDS)
    theirs = {policy: percents(results, other(run, policy), SEEDS) for policy in OTHERS}
    known = {policy: values for policy, values in theirs.items() if values is not None}
    if mine is None or len(known) < len(theirs):
        return (name, f"`{run.definition}`", spread(mine), MISSING, "", "")
    best = max(known, key=lambda policy: sum(known[policy]))
    both, ahead = (spread(mine), spread(known[best])), lead(mine, known[best])
    return (name, f"`{run.definition}`", *both, f"`{best}`", ahead)


SECTION = Section(
    name="slackline-paces",
    title="Paces that can hardly be kept",
    paper=f"""\
ChatBot on one A100 at {RATE_RPS:g} requests/s, with a draft model. A pass of one decode takes
12.3 ms there, of 32 decodes 14.7: without drafts nobody has a token every 12 ms. TTFT
{TTFT_S:g} s. Requests whose SLO was met, in % of those offered, the mean of {len(SEEDS)} seeds with
the least and the most of them, and the best of the ten at the settings they have on loads drawn at
random. The points by which `slackline` is ahead are taken seed by seed.""",
    hours=60 / 3600,
    render=render,
    discussion="""\
Where many have the tight pace, `slackline` takes as many as a pass has time for. Two rows are
behind by more than half a point in the mean. With a tenth of the requests at 12 ms and deadlines it
is 1.6 behind: `adaserve` keeps all those of 50 ms and about a quarter of the others (with seeds 40,
43 and 44); `slackline` declines some of the former for the sake of the latter. With windows of ten
it is 1.0 behind there, and was level before it counted on half of the drafts alone; that brought
11.7 points where all have 12 ms. Where the mean judges it was 1.3 behind while requests of 50 ms
drafted beside prompts that wait, although drafts for all were too slow for 12 ms. With windows of
ten and three paces it drafts only while requests of 12 ms are there; before it drafted for those of
20 ms as well, and was 2.7 points behind.
""",
)
