"""`slackline simulate`: the same plan of requests as `slackline load`, served by the live cores in virtual time."""

import argparse
import math
import shlex
import sys

import msgspec
from rich.console import Console

from loadgen.commands.plan import add_plan_arguments, make_plan
from loadgen.report import make_report, table
from loadgen.simulation import Figures, figures, tally
from shared.drive.latency import Latency
from shared.drive.virtual import ReplicaFacts, simulate
from shared.errors import ConfigError
from shared.perf import store as profiles
from shared.policy import registry

LATENCIES = {"none": Latency.none, "live": Latency.live}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, duration_s=600.0)
    parser.add_argument("--policy", default="qoserve", metavar="P", help=f"{', '.join(registry.names())} (default: qoserve)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy; may be repeated")
    parser.add_argument("--profile", default="a100-llama3-8b", metavar="NAME", help=f"{', '.join(profiles.names())}, or a .json file")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--latency", default="none", choices=LATENCIES, help="of control: none (as papers assume) or what a live fleet has")
    parser.add_argument("--wait", type=float, metavar="S", help="stop so long after the last arrival (default: until all have ended)")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="check every book every N events")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    if args.wait is not None and not 0 <= args.wait < math.inf:
        raise ConfigError("--wait must be 0 or more")
    settings = parse_settings(args.set)
    plan = make_plan(args)
    if args.replicas < 1 or args.check < 0:
        raise ConfigError("--replicas must be 1 or more, --check 0 or more")
    console = Console(stderr=True)
    for note in plan.notes:
        console.print(note, highlight=False)
    with console.status("") as status:
        result = simulate(
            plan.requests,
            args.policy,
            settings,
            args.profile,
            args.replicas,
            plan.tiers,
            LATENCIES[args.latency](),
            args.seed,
            facts=ReplicaFacts(context_tokens=args.context),
            keep_times=True,
            check_every=args.check,
            horizon_s=plan.requests[-1].arrival_s + args.wait if args.wait is not None else None,
            progress=lambda now_s, ended: status.update(f"{now_s:.0f} s simulated, {ended} of {len(plan.requests)} requests ended"),
        )
    found = figures(
        plan.requests,
        result,
        policy=args.policy,
        profile=args.profile,
        replicas=args.replicas,
        seed=args.seed,
        latency=args.latency,
        duration_s=plan.duration_s,
    )
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    report = make_report(
        tally(plan.requests, result, plan.tiers),
        label=args.policy,
        command=shlex.join(["slackline", *sys.argv[1:]]),
        transport="simulation",
        seed=args.seed,
        planned=len(plan.requests),
        offered_s=plan.duration_s,
        notes=plan.notes,
    )
    out = Console(width=None if sys.stdout.isatty() else 120)
    out.print(table(report))
    out.print(_line(found), highlight=False)
    return 0


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """Raises ConfigError for what is not KEY=VALUE."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set `{pair}`: expected KEY=VALUE")
        settings[key] = value
    return settings


def _line(found: Figures) -> str:
    return (
        f"{found.simulated_s:.0f} s simulated in {found.wall_s:.1f} s ({found.requests_per_wall_s:.0f} requests per second): "
        f"{found.iterations} iterations, engines {100 * found.busy_fraction:.0f} % busy, {found.preempted} preemptions"
    )
