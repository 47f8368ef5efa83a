"""The arguments that `simulate`, `capacity`, `search`, `compare` and `bound` share.

They describe the fleet that serves the plan of requests, and how SLOs are judged.
"""

import argparse
import math
from collections.abc import Mapping
from typing import TypeVar

from rich.console import Console

from loadgen.cli.options.common import parse_pairs, parse_roles
from loadgen.cli.options.option import add_options
from loadgen.cli.options.plan import Demand, Plan, add_plan_arguments, read_demand
from loadgen.simulator.deployment import ACCEPTANCE, Deployment, ReplicaFacts
from loadgen.simulator.latency import LATENCIES
from loadgen.trials.trial import Trial
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.perf.draft import DRAFT, DraftCost
from shared.policy import registry
from shared.rules.tiers import TierSet
from shared.vocabulary import Definition

Cost = TypeVar("Cost", DraftCost, None)


def add_policy_arguments(parser: argparse.ArgumentParser, default: str = registry.DEFAULT) -> None:
    names, given = ", ".join(registry.names()), f"= {default}".strip()
    add_options(
        parser,
        f"""
        --policy P {given}: scheduling policy: {names}, or yours as FILE.py:CLASS (default:
            {registry.DEFAULT})
        --set KEY=VALUE (repeated): a setting of the policy; may be repeated
        """,
    )


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the draft model of simulated engines, in virtual time or live."""
    add_options(
        parser,
        f"""
        --draft STEP[,READ]: time of a step of the draft model, and of a prompt token that it reads,
            as fractions of the target's; one number is both, 0: no draft model (default: as the
            profile states it, or {DRAFT:g})
        --acceptance A = {ACCEPTANCE}: mean probability that the first drafted token is accepted
        """,
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


def draft_of(args: argparse.Namespace, default: Cost) -> DraftCost | Cost:
    """The cost of the draft model. Raises ConfigError for options out of range."""
    if not 0 < args.acceptance <= 1:
        raise ConfigError("--acceptance must be above 0 and at most 1")
    return default if args.draft is None else parse_draft(args.draft)


def add_definition_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--definition",
        type=Definition,
        choices=tuple(Definition),
        help="when an SLO is met: every token by its deadline, or by mean TPOT, by the worst TPOT "
        "over 10 tokens, by TTLT only, or by every gap (default: as each tier says, and deadline "
        "where it says nothing)",
    )


def add_trial_arguments(parser: argparse.ArgumentParser) -> None:
    add_draft_arguments(parser)
    add_definition_argument(parser)
    add_options(
        parser,
        f"""
        --profile NAME = a100-llama3-8b: iteration-time model of the GPU:
            {", ".join(profiles.names())}, or a .json file
        --replicas N = 1: number of replicas
        --roles ROLE,... =: of the replicas in turn, the last one of the rest: both, prefill,
            decode or auto
        --link GBIT (float): KV moves between replicas, so many 10^9 bits a second to and from each
        --kv-tokens N (int): KV of a replica, in tokens (default: as the profile states it)
        --latency {"|".join(LATENCIES)} = none: latency of control: none, as papers assume, or that
            of a live fleet
        --wait S (float): stop S seconds after the last arrival (default: run until all requests
            have ended)
        """,
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `simulate`, which `bound` takes as well: one plan, one policy."""
    add_plan_arguments(parser, duration_s=600.0)
    add_policy_arguments(parser)
    add_trial_arguments(parser)
    add_options(
        parser,
        """
        --check N = 0: check the consistency of all books every N events; 0: never
        --json: print the figures as JSON instead of a table
        """,
    )


def read_run(args: argparse.Namespace, console: Console) -> tuple[Trial, Plan]:
    """The trial and the plan of these arguments; prints its notes. Raises ConfigError."""
    if args.check < 0:
        raise ConfigError("--check must be 0 or more")
    demand = read_demand(args)
    trial = make_trial(args, demand, args.policy, parse_pairs("--set", args.set), args.rate)
    plan = demand.at(args.rate)
    for note in plan.notes:
        console.print(note)
    return trial, plan


def judged_tiers(args: argparse.Namespace, demand: Demand) -> TierSet:
    """The tiers of the load, judged as these arguments say."""
    return demand.tiers.judged_by(args.definition)


def _kv_blocks(kv_tokens: int | None) -> int:
    """The blocks of this KV; 0: as the profile states it. Raises ConfigError for less than one."""
    if kv_tokens is None:
        return 0
    if (blocks := kv_tokens // ReplicaFacts().block_tokens) < 1:
        raise ConfigError(f"--kv-tokens must be {ReplicaFacts().block_tokens} or more")
    return blocks


def make_trial(
    args: argparse.Namespace,
    demand: Demand,
    policy: str,
    settings: Mapping[str, str],
    rate_rps: float | None,
) -> Trial:
    """The trial. Raises ConfigError for an unknown policy, setting or profile, or number."""
    if args.replicas < 1:
        raise ConfigError("--replicas must be 1 or more")
    if args.link is not None and not 0 < args.link < math.inf:
        raise ConfigError("--link must be above 0")
    if args.wait is not None and not 0 <= args.wait < math.inf:
        raise ConfigError("--wait must be 0 or more")
    file = profiles.read(args.profile)
    registry.make(policy, settings)
    deployment = Deployment(
        policy,
        args.profile,
        args.replicas,
        settings,
        LATENCIES[args.latency],
        ReplicaFacts(kv_blocks=_kv_blocks(args.kv_tokens), context_tokens=args.context),
        draft=draft_of(args, file.draft),
        acceptance=args.acceptance,
        roles=parse_roles(args.roles),
        link_gbit_s=args.link or 0.0,
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
