"""Fleets and loads that change while they run: a replica that dies, a mix that drifts."""

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.section import Results, Section
from loadgen.lab.papers.slackline.same_loads import load_of
from loadgen.lab.papers.slackline.systems import OURS, SEEDS, other, ours, percents, spread
from loadgen.markdown import table
from loadgen.simulator.deployment import Outage
from shared.rules.tiers import DEMO_3

RIVALS = ("qoserve", "slos_serve", "edf")
# Requests a second for each replica, in parts of the matrix's rate: four replicas hold it with
# room, three just about.
PART = 0.7
DYING = ("QoServe, ShareGPT", "SLOs-Serve, Coder", "SLOs-Serve, Mixed", "Ascendra")
REPLICAS = 4
DRIFT_RPS, STEPS = 5.0, 6


def dying(name: str, *, dead: bool) -> Run:
    """Four replicas, one of which is dead for the middle third."""
    run = load_of(name, 1.0, PART * REPLICAS / 2)
    third_s = run.duration_s / 3
    outages = (Outage(0, third_s, third_s),) if dead else ()
    return replace(run, replicas=REPLICAS, outages=outages)


def drifting(duration_s: float) -> Run:
    """Interactive requests give way to summaries and these to batches, at one rate in all."""
    step_s = duration_s / STEPS
    shares = {
        "interactive": (3, 2.2, 1.4, 0.6, 0.3, 1.8),
        "summary": (0, 0.6, 1.2, 1.6, 0.7, 1.2),
        "batch": (0, 0.2, 0.4, 0.8, 2.0, 0),
    }
    bursts = ";".join(
        f"{tier}={','.join(f'{step_s:g}:{share / 3:.4g}' for share in each)}"
        for tier, each in shares.items()
    )
    return Run(
        policy="",
        workload="mix",
        rate_rps=2 * DRIFT_RPS,
        duration_s=duration_s,
        tiers=DEMO_3,
        replicas=2,
        bursts=bursts,
        context_tokens=8192,
        profile="a100-llama3-8b",
    )


def render(results: Results, duration_s: float) -> str:
    cases = [("`mix`, `demo-3`", "its mix drifts", drifting(duration_s))]
    for name in DYING:
        cases.append((name, "nothing", dying(name, dead=False)))
        cases.append((name, "one of four replicas dies", dying(name, dead=True)))
    rows = []
    for load, case, run in cases:
        cells = [spread(percents(results, ours(run), SEEDS))]
        cells += [spread(percents(results, other(run, rival), SEEDS)) for rival in RIVALS]
        rows.append((load, case, *cells))
    head = ("load", "what changes", f"`{OURS}`", *(f"`{rival}`" for rival in RIVALS))
    return table(head, rows)


SECTION = Section(
    name="slackline-changes",
    title="What changes while it runs",
    paper=f"""\
Requests whose SLO was met, in %: the mean of three seeds, with the least and the most. A worker
dies after a third of the run and is there again, empty, after the second; its requests go on
elsewhere after {1.1:g} s, with their tokens and without their KV. The loads are those of the first
table at {PART:g} of their rates for each replica. The drifting mix has five minutes of
{2 * DRIFT_RPS:g} requests/s on two replicas: first interactive ones alone, then more and more
summaries, then batches, then interactive ones and summaries.""",
    hours=300 / 3600,
    render=render,
    discussion="""\
`slackline` is first in every row but one, in which it is 0.4 points behind `slos_serve`. That a
replica is dead for a third of the time costs it up to 2.3 points (of ShareGPT it happens to keep
0.3 more), `slos_serve` 1.4 to 4.4, `qoserve` 3.9 to 10.6 and `edf` 6.7 to 47.6. On the mix that
drifts it is 5.3 points ahead of `qoserve`.
""",
)
