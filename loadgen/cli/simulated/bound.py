"""`slackline bound`: an upper bound on the requests of a plan that any scheduler could satisfy.

The bound holds for every policy, even one that knows the future.
"""

import argparse
import sys

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from loadgen.bound.limit import Bound, bound
from loadgen.cli.options.trial import add_run_arguments, read_run
from loadgen.load.report import percent
from loadgen.tables import print_line, print_table

# The limits that each relaxation takes into account, from the loosest. docs/bound.md defines and
# proves them.
ACCOUNTS = {
    "none": "nothing",
    "alone": "each request with a replica to itself",
    "work": "the least seconds that all prompts and decode steps take",
    "memory": "work, and the iterations that a full KV cache forces",
    "pace": "work, and the iterations that the pace of the satisfied requests forces",
}
EPILOG = """\
The command takes every option of `simulate`, so that a `simulate` command line works with the word
replaced. Options about how requests are served have no effect on the bound: --policy, --set,
--latency, --wait and --check. Nor do --draft and --acceptance: the bound holds for schedulers that
do not speculate."""


class BoundSetup(Struct, frozen=True, kw_only=True):
    """The load and the fleet of a bound, with the keys of `simulate --json`.

    `--json` prints these and the bound as one object.
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
    with console.status("computing the tightest bound"):
        found = bound(
            plan.requests,
            trial.tiers,
            trial.deployment.profile,
            trial.deployment.replicas,
        )
    setup = BoundSetup(
        profile=trial.deployment.profile,
        replicas=trial.deployment.replicas,
        workload=trial.workload,
        tiers=trial.tiers.name,
        rate_rps=trial.rate_rps
        if trial.rate_rps is not None
        else len(plan.requests) / trial.duration_s,
        duration_s=trial.duration_s,
        seed=trial.seed,
        definition=trial.tiers.definition,
        offered=len(plan.requests),
    )
    if args.json:
        print(msgspec.json.encode(msgspec.to_builtins(setup) | msgspec.to_builtins(found)).decode())
        return 0
    out = Console(width=None if sys.stdout.isatty() else 120)
    print_table(out, _table(setup, found))
    print_line(
        out,
        f"Every scheduler without speculation violates at least "
        f"{percent(found.violated_fraction)} of these {setup.offered} requests "
        f"(definition {setup.definition}, {setup.replicas} x {setup.profile}; "
        f"computed in {found.wall_s:.1f} s).",
    )
    return 0


def _table(setup: BoundSetup, found: Bound) -> Table:
    out = Table(title=f"{setup.rate_rps:.2f} requests/s, seed {setup.seed}", title_justify="left")
    out.add_column("relaxation")
    out.add_column("takes into account")
    out.add_column("met at most", justify="right")
    out.add_column("violated at least", justify="right")
    for name, met in found.met_by.items():
        style = "bold" if name == found.by else ""
        out.add_row(name, ACCOUNTS[name], percent(met), percent(1 - met), style=style)
    return out
