"""`slackline advise`: simulates how many replicas of which GPU a recorded load needs."""

import argparse

from loadgen.advise.advice import SEARCHED_S, SHOWN, advise
from loadgen.advise.advice_text import print_advice
from loadgen.cli.options.common import add_jobs_argument, add_plots_argument
from loadgen.cli.options.option import add_options
from loadgen.cli.options.plan import (
    add_context_argument,
    add_of_model_argument,
    add_tiers_argument,
    read_fitting,
)
from loadgen.cli.options.trial import add_definition_argument, add_draft_arguments, draft_of
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.trace import Trace
from loadgen.load.workload import Rows
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.tables import errors, output, print_json
from loadgen.trials.parallel import check_jobs
from loadgen.trials.trial import Trial
from loadgen.writing import make_folder
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.rules.tiers import TierSet, load_tiers

PROFILES = ("a100-llama3-8b", "h100-llama3-8b")
EPILOG = f"""\
Replicas are counted for the busiest {SEARCHED_S:g} s: what is enough for them, and for the mean
load, is enough for the rest. Where the load is heavy, two replicas serve a share of it, and the
number of replicas is in proportion. The chosen fleet, and one replica fewer, then serve the busiest
stretch of {SHOWN} requests, or the whole trace if it has fewer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_options(
        parser,
        f"""
        --trace FILE (required): recorded load, as .csv or .csv.gz, in our schema or in Azure's,
            with arrival times
        --profile NAME (repeated): GPU and model to count replicas of:
            {", ".join(profiles.names())}, or a .json file; may be repeated
            (default: {" and ".join(PROFILES)})
        --target FRACTION = 0.99: fraction of the requests whose SLO is to be met
        --seed K = 0: random seed: it decides which request is of which tier
        --json: print JSON instead of tables
        """,
    )
    add_of_model_argument(parser)
    add_tiers_argument(parser)
    add_draft_arguments(parser)
    add_definition_argument(parser)
    add_context_argument(parser)
    add_plots_argument(parser)
    add_jobs_argument(parser)


def run(args: argparse.Namespace) -> int:
    jobs = check_jobs(args.jobs)
    if not 0 < args.target <= 1:
        raise ConfigError("--target is a fraction, above 0 and at most 1")
    if args.context < 1:
        raise ConfigError("--context must be 1 or more")
    tiers = load_tiers(args.tiers).judged_by(args.definition)
    names = dict.fromkeys(args.profile or PROFILES)
    for name in names:
        profiles.read(name)
    console = errors()

    def show(line: str) -> None:
        console.print(line, markup=False)

    trace, notes = read_fitting(args.trace, args.context, args.of_model)
    for note in notes:
        show(note)
    requests = _requests(trace, tiers, args.seed)
    trials = [
        trial
        for profile in names
        for trial in _trials(args, profile, tiers, trace.name, requests[-1].arrival_s)
    ]
    make_folder("--plots", args.plots)
    with console.status("simulating"):
        advice = advise(trials, requests, args.target, jobs, show)
    if args.plots is not None:
        # imported here: it takes half a second
        from loadgen.advise.advice_plots import write_plots

        for path in write_plots(advice, args.plots):
            show(f"wrote {path}")
    if args.json:
        print_json(advice)
    else:
        print_advice(advice, tiers, output(120))
    return 0


def _requests(trace: Trace, tiers: TierSet, seed: int) -> list[PlannedRequest]:
    """The requests of the trace, at their recorded times. Raises ConfigError."""
    if not trace.recorded:
        raise ConfigError(
            f"trace {trace.name} has no arrival times; `slackline capacity` says what rate a fleet "
            "carries with these lengths"
        )
    begin_s = trace.rows[0].arrival_s or 0.0
    arrivals_s = [(row.arrival_s or 0.0) - begin_s for row in trace.rows]
    return plan_requests(arrivals_s, Rows(trace, in_order=True), tiers, seed)


def _trials(
    args: argparse.Namespace, profile: str, tiers: TierSet, name: str, last_s: float
) -> list[Trial]:
    """A trial of this profile without a draft model, and one with it unless that is ruled out."""
    file = profiles.read(profile)
    draft = draft_of(args, file.draft)
    return [
        Trial(
            deployment=Deployment(
                registry.DEFAULT,
                profile,
                facts=ReplicaFacts(context_tokens=args.context),
                draft=cost,
                acceptance=args.acceptance,
            ),
            tiers=tiers,
            workload=name,
            duration_s=max(last_s, 1.0),
            seed=args.seed,
        )
        for cost in dict.fromkeys((0.0, draft))
    ]
