"""`slackline bound`: how many of a plan's requests any scheduler could satisfy at most, whoever
serves them and knowing the future.
"""

import argparse
import sys

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from loadgen.bound.limit import Bound, bound
from loadgen.commands.trial_arguments import add_run_arguments, read_run
from loadgen.load.report import percent

# What each relaxation takes into account, from the loosest; docs/bound.md defines and proves them.
ACCOUNTS = {
    "none": "nothing",
    "alone": "each request with a replica to itself",
    "work": "the seconds that all prompts and decode steps take at least",
    "memory": "and the iterations that a full KV cache forces",
    "pace": "work, and the iterations that the pace of the kept requests forces",
}
EPILOG = """Every option of `simulate` is taken, so that a command needs but another word. Those that say how requests are served do not
matter to a bound: --policy, --set, --latency, --wait and --check; nor do --draft and --acceptance, for it holds for schedulers that
do not speculate."""


class Asked(Struct, frozen=True, kw_only=True):
    """Of what the bound is, in the words of `simulate --json`: `--json` prints this and the bound
    as one object.
    """

    profile: str
    replicas: int
    workload: str
    tiers: str
    rate_rps: float
    duration_s: float
    seed: int
    definition: str
    offered: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True)
    trial, plan = read_run(args, console)
    with console.status("looking for the least bound"):
        found = bound(plan.requests, trial.tiers, trial.profile, trial.replicas, trial.definition)
    asked = Asked(
        profile=trial.profile,
        replicas=trial.replicas,
        workload=trial.workload,
        tiers=trial.tiers.name,
        rate_rps=trial.rate_rps
        if trial.rate_rps is not None
        else len(plan.requests) / trial.duration_s,
        duration_s=trial.duration_s,
        seed=trial.seed,
        definition=trial.definition,
        offered=len(plan.requests),
    )
    if args.json:
        print(msgspec.json.encode(msgspec.to_builtins(asked) | msgspec.to_builtins(found)).decode())
        return 0
    out = Console(width=None if sys.stdout.isatty() else 120)
    out.print(_table(asked, found))
    out.print(
        f"No scheduler can violate less than {percent(found.violated_fraction)} of these {asked.offered} requests without speculation "
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
