"""The arguments that `simulate`, `capacity`, `search`, `compare` and `bound` share.

They describe the fleet that serves the plan of requests, and how SLOs are judged.
"""

import argparse
import math
from collections.abc import Mapping

from rich.console import Console

from loadgen.cli.plan_arguments import Demand, Plan, add_plan_arguments, read_demand
from loadgen.simulator.deployment import ACCEPTANCE, Deployment, ReplicaFacts
from loadgen.simulator.latency import LATENCIES
from loadgen.trials.trial import Trial
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.perf.draft import DRAFT, DraftCost
from shared.policy import registry
from shared.rules.tiers import TierSet
from shared.vocabulary import Definition

DEFINITIONS_HELP = (
    "when an SLO is met: every token by its deadline, or by mean TPOT, by the worst TPOT over 10 "
    "tokens, or by TTLT alone (default: as each tier says, and deadline where it says nothing)"
)


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        default=registry.DEFAULT,
        metavar="P",
        help=f"scheduling policy: {', '.join(registry.names())} (default: {registry.DEFAULT})",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the policy; may be repeated",
    )


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the draft model of simulated engines, in virtual time or live."""
    parser.add_argument(
        "--draft",
        metavar="STEP[,READ]",
        help="time of a step of the draft model, and of a prompt token that it reads, as fractions "
        "of the target's; one number is both, 0: no draft model (default: as the profile states "
        f"it, or {DRAFT:g})",
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        default=ACCEPTANCE,
        metavar="A",
        help=f"mean probability that the first drafted token is accepted (default: {ACCEPTANCE:g})",
    )


def parse_draft(text: str) -> DraftCost:
    """The cost that --draft names. Raises ConfigError unless it is one or two fractions."""
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    match numbers:
        case [step] if 0 <= step <= 1:
            return step
        case [step, read] if 0 <= step <= 1 and 0 <= read <= 1:
            return step, read
    raise ConfigError(f"--draft {text}: write STEP or STEP,READ, fractions from 0 (no draft) to 1")


def check_acceptance(acceptance: float) -> None:
    """Raises ConfigError for a number out of range."""
    if not 0 < acceptance <= 1:
        raise ConfigError("--acceptance must be above 0 and at most 1")


def add_trial_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        default="a100-llama3-8b",
        metavar="NAME",
        help=f"iteration-time model of the GPU: {', '.join(profiles.names())}, or a .json file "
        "(default: a100-llama3-8b)",
    )
    add_draft_arguments(parser)
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="number of replicas (default: 1)"
    )
    parser.add_argument(
        "--definition", type=Definition, choices=tuple(Definition), help=DEFINITIONS_HELP
    )
    parser.add_argument(
        "--latency",
        default="none",
        choices=LATENCIES,
        help="latency of control: none, as papers assume, or that of a live fleet (default: none)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help="stop S seconds after the last arrival (default: run until all requests have ended)",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `simulate`, which `bound` takes as well: one plan, one policy."""
    add_plan_arguments(parser, duration_s=600.0)
    add_policy_arguments(parser)
    add_trial_arguments(parser)
    parser.add_argument(
        "--check",
        type=int,
        default=0,
        metavar="N",
        help="check the consistency of all books every N events; 0: never (default: 0)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of a table"
    )


def read_run(args: argparse.Namespace, console: Console) -> tuple[Trial, Plan]:
    """The trial and the plan of these arguments. Prints the notes of the plan.

    Raises ConfigError.
    """
    if args.check < 0:
        raise ConfigError("--check must be 0 or more")
    demand = read_demand(args)
    trial = make_trial(args, demand, args.policy, parse_settings(args.set), args.rate)
    plan = demand.at(args.rate)
    for note in plan.notes:
        console.print(note, highlight=False)
    return trial, plan


def judged_tiers(args: argparse.Namespace, demand: Demand) -> TierSet:
    """The tiers of the load, judged as these arguments say."""
    return demand.tiers.judged_by(args.definition)


def make_trial(
    args: argparse.Namespace,
    demand: Demand,
    policy: str,
    settings: Mapping[str, str],
    rate_rps: float | None,
) -> Trial:
    """The trial of these arguments.

    Raises ConfigError for an unknown policy, setting or profile, and for numbers out of range.
    """
    if args.replicas < 1:
        raise ConfigError("--replicas must be 1 or more")
    if args.wait is not None and not 0 <= args.wait < math.inf:
        raise ConfigError("--wait must be 0 or more")
    file = profiles.read(args.profile)
    check_acceptance(args.acceptance)
    registry.make(policy, settings)
    deployment = Deployment(
        policy,
        args.profile,
        args.replicas,
        settings,
        LATENCIES[args.latency],
        ReplicaFacts(context_tokens=args.context),
        draft=file.draft if args.draft is None else parse_draft(args.draft),
        acceptance=args.acceptance,
    )
    return Trial(
        deployment=deployment,
        tiers=judged_tiers(args, demand),
        workload=demand.name,
        rate_rps=rate_rps,
        duration_s=args.duration,
        seed=args.seed,
        wait_s=args.wait,
    )


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """The settings by key. Raises ConfigError for a malformed pair or a repeated key."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"setting `{pair}`: expected KEY=VALUE")
        if key in settings:
            raise ConfigError(f"setting `{key}` is given twice")
        settings[key] = value
    return settings
