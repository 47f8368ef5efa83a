"""`slackline bound`: how many of a plan's requests any scheduler could satisfy at most, whoever serves them and knowing the future."""

import argparse
import sys

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from loadgen.bound.bound import Bound, bound
from loadgen.commands.plan import add_plan_arguments, make_plan
from loadgen.definition import DEADLINE, DEFINITIONS
from loadgen.report import percent
from shared.errors import ConfigError
from shared.perf import store as profiles

# What each relaxation takes into account, from the loosest; docs/bound.md defines and proves them.
ACCOUNTS = {
    "none": "nothing",
    "alone": "each request with a replica to itself",
    "work": "the seconds that all prompts and decode steps take at least",
    "memory": "and the iterations that a full KV cache forces",
    "pace": "work, and the iterations that the pace of the kept requests forces",
}


class Asked(Struct, frozen=True, kw_only=True):
    """Of what the bound is: `--json` prints this and the bound as one object."""

    profile: str
    replicas: int
    rate_rps: float
    seed: int
    definition: str
    offered: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, duration_s=600.0)
    parser.add_argument("--profile", default="a100-llama3-8b", metavar="NAME", help=f"{', '.join(profiles.names())}, or a .json file")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--definition", default=DEADLINE, metavar="D", help=f"when an SLO is met: {', '.join(DEFINITIONS)}")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    plan = make_plan(args)
    if args.replicas < 1:
        raise ConfigError("--replicas must be 1 or more")
    console = Console(stderr=True)
    for note in plan.notes:
        console.print(note, highlight=False)
    with console.status("looking for the least bound"):
        found = bound(plan.requests, plan.tiers, args.profile, args.replicas, args.definition)
    asked = Asked(
        profile=args.profile,
        replicas=args.replicas,
        rate_rps=len(plan.requests) / plan.duration_s,
        seed=args.seed,
        definition=args.definition,
        offered=len(plan.requests),
    )
    if args.json:
        print(msgspec.json.encode(msgspec.to_builtins(asked) | msgspec.to_builtins(found)).decode())
        return 0
    out = Console(width=None if sys.stdout.isatty() else 120)
    out.print(_table(asked, found))
    out.print(
        f"No scheduler can violate less than {percent(found.violated_fraction)} of these {asked.offered} requests "
        f"(definition {asked.definition}, {asked.replicas} x {asked.profile}; found in {found.wall_s:.1f} s).",
        highlight=False,
    )
    return 0


def _table(asked: Asked, found: Bound) -> Table:
    made = Table(title=f"{asked.rate_rps:.2f} requests/s, seed {asked.seed}", title_justify="left")
    made.add_column("relaxation")
    made.add_column("takes into account")
    made.add_column("met at most", justify="right")
    made.add_column("violated at least", justify="right")
    for name, met in found.met_by.items():
        style = "bold" if name == found.by else ""
        made.add_row(name, ACCOUNTS[name], percent(met), percent(1 - met), style=style)
    return made
