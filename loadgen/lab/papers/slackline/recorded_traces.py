"""Recorded traces: settings are chosen on the first half of each, and judged on the second."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loadgen.lab.papers.experiment import PROFILE as QOSERVE_PROFILE
from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.matrix.loads import PROFILE, REPLICAS
from loadgen.lab.papers.matrix.settings import CHUNKS, FIXED, PAPERS, Settings, settings_of
from loadgen.lab.papers.recorded import KEPT, Half
from loadgen.lab.papers.section import MISSING, Results, Section
from loadgen.lab.papers.slackline.same_loads import PREFILL_FIRST
from loadgen.lab.papers.slackline.systems import OURS, lead, met_percent, percents, spread
from loadgen.markdown import table
from shared.rules.tiers import load_tiers

CHOSEN_WITH = 1  # seed
SEEDS = (1, 2, 3)


def _run(
    trace: str,
    tiers: str,
    definition: str,
    rate_rps: float,
    duration_s: float,
    profile: str = PROFILE,
    wait_s: float | None = None,
) -> Run:
    return Run(
        policy=OURS,
        workload=trace,
        rate_rps=rate_rps,
        duration_s=duration_s,
        tiers=load_tiers(tiers),
        replicas=REPLICAS,
        profile=profile,
        definition=definition,
        wait_s=wait_s,
    )


_CODE, _CONVERSATIONS = "azure2023_code_first_half", "azure2023_conv_first_half"
# Rates were tried on the first half alone.
LOADS: Mapping[str, Run] = {
    "Azure, code; QoServe's tiers": _run(
        _CODE, "qoserve-3", "deadline", 16.0, 120, QOSERVE_PROFILE
    ),
    "Azure, code; Coder's": _run(_CODE, "slos-serve-coder", "max-tpot-10", 4.0, 100),
    "Azure, conversations; ChatBot's": _run(
        _CONVERSATIONS, "slos-serve-chatbot", "max-tpot-10", 18.0, 60
    ),
    "Mooncake, conversations; QoServe's": _run(
        "mooncake_conversation_first_half", "qoserve-3", "deadline", 2.5, 300, QOSERVE_PROFILE
    ),
    "ServeGen, images; Ascendra's": _run(
        "servegen_mm_image_0900_1100", "ascendra-8b-sharegpt", "mean-tpot", 20.0, 60
    ),
    "ServeGen, a large model; AdaServe's": _run(
        "servegen_m_large_day2_1000_1100",
        "adaserve-3",
        "mean-tpot",
        22.0,
        30,
        wait_s=20.0,  # as in the matrix: first tokens have no deadline there
    ),
}
SYSTEMS: Mapping[str, Sequence[Settings]] = {
    **{policy: [{"chunk_tokens": tokens} for tokens in CHUNKS] for policy in FIXED},
    **{policy: settings_of(policy, drafts=True) for policy in PAPERS},
    "vllm": (*settings_of("vllm", drafts=True), PREFILL_FIRST[1]),
}


def render(results: Results, duration_s: float) -> str:
    times = duration_s / 3600
    rows = [
        _row(results, name, replace(run, duration_s=round(run.duration_s * times, 1)))
        for name, run in LOADS.items()
    ]
    head = ("trace; tiers", "requests/s", f"`{OURS}`", "the best of the ten", "", "points ahead")
    return table(head, rows)


def _row(results: Results, name: str, run: Run) -> Sequence[str]:
    second = replace(run, half=Half.SECOND)
    mine = percents(results, second, SEEDS)
    chosen = {
        policy: _chosen(results, replace(run, policy=policy), settings)
        for policy, settings in SYSTEMS.items()
    }
    theirs: dict[str, Sequence[float]] = {}
    for policy, settings in chosen.items():
        if settings is not None:
            found = percents(
                results, replace(second, policy=policy, settings=dict(settings)), SEEDS
            )
            theirs |= {} if found is None else {policy: found}
    if mine is None or len(theirs) < len(SYSTEMS):
        return (name, f"{run.rate_rps:g}", spread(mine), MISSING, "", "")
    best = max(theirs, key=lambda policy: sum(theirs[policy]))
    shown = ", ".join(f"{key}={value}" for key, value in (chosen[best] or {}).items())
    return (
        name,
        f"{run.rate_rps:g}",
        spread(mine),
        spread(theirs[best]),
        f"`{best}:{shown}`" if shown else f"`{best}`",
        lead(mine, theirs[best]),
    )


def _chosen(results: Results, run: Run, settings: Sequence[Settings]) -> Settings | None:
    """The settings that meet most of the first half; None while a run is missing."""
    first = replace(run, half=Half.FIRST, seed=CHOSEN_WITH)
    each = [met_percent(results, replace(first, settings=dict(one))) for one in settings]
    known = [value for value in each if value is not None]
    return settings[known.index(max(known))] if len(known) == len(settings) else None


SECTION = Section(
    name="slackline-traces",
    title="Recorded traces",
    paper=f"""\
The arrivals and lengths of published traces, at tiers of the papers, on two A100s with a draft
model. Each trace is cut in two by time. On the first half each of the ten policies got the setting
that meets most there, of all settings of [which-policy.md](which-policy.md), with seed
{CHOSEN_WITH}, and the rate was chosen. `slackline` has no setting. Judged is the second half, which
no constant was tuned with, either: requests whose SLO was met, in %, the mean of {len(SEEDS)} seeds
with the least and the most of them, and the same of the points by which `slackline` is ahead, seed
by seed. A seed draws {100 * KEPT:.0f} % of the rows; then the time of the half is stretched or
shortened to the rate. Requests beyond 18,432 tokens are left out. Azure's and Mooncake's traces are
recorded; ServeGen's are drawn by their publishers from the counts of each client.""",
    hours=1.0,
    render=render,
    discussion="""\
`slackline` is ahead on five of the six second halves, by 0.3 to 4.2 points on four and by 37.5 on
AdaServe's tiers: with every seed, but on Mooncake's with one alone; another is level there, and one
0.1 behind. On Azure's conversations it is 0.2 behind `slos_serve`; both keep nearly all there. It
is the lighter half: of the first, `slackline` kept 83.8 % at 20 requests/s and 95.9 at 16. Nobody
keeps much of Azure's code with Coder's tiers, at any rate that was tried (on the first half
`slackline` kept 77.8 % at 5 requests/s and 71.8 at 10; seed 1).
""",
)
