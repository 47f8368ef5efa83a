"""The loads of the matrix, with slackline beside the best of the ten at its best setting."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.matrix.loads import LOADS, Load
from loadgen.lab.papers.matrix.settings import CHUNKS, FIXED, PAPERS, Settings
from loadgen.lab.papers.section import MISSING, Results, Section
from loadgen.lab.papers.slackline.systems import OURS, SEEDS, lead, percents, spread
from loadgen.markdown import table

WORK = ("slos_serve", {"long_deadlines": "work"})
SLOS_SERVE = ("slos_serve", dict[str, str]())
QOSERVE = ("qoserve", dict[str, str]())
PREFILL_FIRST = ("vllm", {"mode": "prefill_first"})
# Of each load: the rate of the matrix in docs/which-policy.md, and the seconds of arrivals.
ROWS: Mapping[str, tuple[float, float]] = {
    "QoServe, code": (11.34, 300),
    "QoServe, conversations": (13.0, 300),
    "QoServe, ShareGPT": (5.985, 300),
    "SLOs-Serve, ChatBot": (21.3, 60),
    "SLOs-Serve, Coder": (10.8, 150),
    "SLOs-Serve, Summarizer": (13.9, 75),
    "SLOs-Serve, Mixed": (18.7, 60),
    "SLOs-Serve, ToolLLM": (3.0, 150),
    "SLOs-Serve, Reasoning": (0.865, 600),
    "SOLA, tight": (23.1, 60),
    "AdaServe": (26.6, 50),
    "Ascendra": (7.68, 120),
}
# The ten policies in two tables, with what stands above each.
TEN: Mapping[str, Sequence[str]] = {
    "Each of the ten at the setting that suits it best there, in the mean of the seeds. The "
    "policies of the five papers:": ("slos_serve", "qoserve", "sola", "adaserve", "ascendra"),
    "Sarathi's orders and vLLM:": (*FIXED, "vllm"),
}
CLOSE = "SLOs-Serve, ToolLLM"  # three seeds do not tell there who is ahead
MORE_SEEDS = range(61, 97)


def render(results: Results, duration_s: float) -> str:
    times = duration_s / 3600
    return "\n\n".join(
        (
            table(
                ("load", "requests/s", "`slackline`", "the best of the ten", "", "points ahead"),
                [_row(results, load, times) for load in LOADS],
            ),
            *(f"{above}\n\n{_all(results, times, policies)}" for above, policies in TEN.items()),
            _more(results, times),
        )
    )


def _more(results: Results, times: float) -> str:
    """The load that is close, with more seeds."""
    run = load_of(CLOSE, times)
    systems = ((OURS, dict[str, str]()), SLOS_SERVE)
    mine, theirs = (
        percents(results, replace(run, policy=policy, settings=settings), MORE_SEEDS)
        for policy, settings in systems
    )
    if mine is None or theirs is None:
        return MISSING
    ahead = [ours - other for ours, other in zip(mine, theirs, strict=True)]
    margin = 1.96 * stdev(ahead) / len(ahead) ** 0.5
    return (
        f"{CLOSE} with {len(MORE_SEEDS)} more seeds, {MORE_SEEDS[0]} to {MORE_SEEDS[-1]}: "
        f"`{OURS}` {fmean(mine):.1f}, `{SLOS_SERVE[0]}` {fmean(theirs):.1f}. The difference of "
        f"a seed is {fmean(ahead):+z.1f} in the mean, with a 95 % interval of "
        f"{margin:.1f} to either side."
    )


def load_of(name: str, hours: float, times: float = 1.0) -> Run:
    """A load of the matrix at so many times its rate, for so many times its length."""
    load = next(load for load in LOADS if load.name == name)
    rate_rps, seconds = ROWS[name]
    return replace(
        load.run,
        rate_rps=float(f"{rate_rps * times:.4g}"),
        duration_s=round(seconds * hours, 1),
    )


def _row(results: Results, load: Load, times: float) -> Sequence[str]:
    rate_rps = ROWS[load.name][0]
    return (load.name, f"{rate_rps:g}", *beside(results, load.name, load_of(load.name, times)))


def rivals(name: str) -> Sequence[tuple[str, Settings]]:
    """The ten policies at all their settings of the matrix, and vLLM with its prefills first."""
    load = next(load for load in LOADS if load.name == name)
    return (
        *((policy, settings) for policy in PAPERS for settings in load.settings_of(policy)),
        PREFILL_FIRST,
        *((policy, {"chunk_tokens": tokens}) for policy in FIXED for tokens in CHUNKS),
    )


def _all(results: Results, times: float, policies: Sequence[str]) -> str:
    """These policies beside slackline, on each load."""
    rows = []
    for load in LOADS:
        run = load_of(load.name, times)
        mine = spread(percents(results, replace(run, policy=OURS), SEEDS))
        rows.append((load.name, mine, *(_most(results, load.name, run, one) for one in policies)))
    return table(("load", f"`{OURS}`", *(f"`{policy}`" for policy in policies)), rows)


def _most(results: Results, name: str, run: Run, policy: str) -> str:
    """This policy at the setting that suits it best there, in the mean of the seeds."""
    each = [
        percents(results, replace(run, policy=policy, settings=dict(settings)), SEEDS)
        for rival, settings in rivals(name)
        if rival == policy
    ]
    known = [values for values in each if values is not None]
    return MISSING if len(known) < len(each) else spread(max(known, key=sum))


def beside(results: Results, name: str, run: Run) -> Sequence[str]:
    """The cells of a run of this load: slackline's, the best rival's, which that is, and how far
    slackline is ahead.
    """
    mine = percents(results, replace(run, policy=OURS), SEEDS)
    systems = rivals(name)
    theirs = [
        percents(results, replace(run, policy=policy, settings=dict(settings)), SEEDS)
        for policy, settings in systems
    ]
    known = [values for values in theirs if values is not None]
    if mine is None or len(known) < len(theirs):
        return (spread(mine), MISSING, "", "")
    best = max(known, key=sum)
    policy, settings = systems[known.index(best)]
    shown = ", ".join(f"{key}={value}" for key, value in settings.items())
    return (
        spread(mine),
        spread(best),
        f"`{policy}:{shown}`" if shown else f"`{policy}`",
        lead(mine, best),
    )


SECTION = Section(
    name="slackline-matrix",
    title="The loads of the matrix",
    paper=f"""\
Requests whose SLO was met (ToolLLM: sessions), in % of those offered: the mean of {len(SEEDS)}
seeds, with which no rule was chosen (one constant was, with seed 21: [Tables](#tables)), and in
brackets the least and the most of them. Each load is offered at the rate of
[which-policy.md](which-policy.md), at which the best of the ten policies meets 90 % with seed 7
(QoServe's: half as much again as QoServe carries). Beside it the best of the ten on these very
runs, at any of the settings of that page, or `vllm` with `mode=prefill_first`. The policy and its
setting are chosen afterwards, with the figures of the table. The points by which `slackline` is
ahead of it are taken seed by seed, and also have their mean, least and most.""",
    hours=1.0,
    render=render,
    discussion="""\
`slackline` is ahead on eight loads, with every seed, and by 3.5 to 6.9 points in the mean: all but
QoServe's and ToolLLM. How far depends on the seed, most on Reasoning: 0.4 to 16.9 points. On
QoServe's three it is within 0.1 points of `slos_serve:long_deadlines=work`; five minutes do not
separate them, and [slackline.md](slackline.md) has half an hour. On ToolLLM it is 1.6 points behind
with these seeds (behind with each), and 0.4 with 36 more. A session counts only if all its rounds
do, and the policy does not look at sessions.
""",
)
