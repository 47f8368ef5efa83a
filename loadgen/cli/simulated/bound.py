"""`slackline bound`: an upper bound on the requests of a plan that any scheduler could satisfy.

The bound holds for every policy, even one that knows the future.
"""

import argparse

import msgspec
from rich.table import Table

from loadgen.bound.limit import Bound, bound
from loadgen.cli.options.trial import add_run_arguments, read_run
from loadgen.load.report import percent
from loadgen.tables import errors, output, print_json, print_line, print_table, with_columns

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    console = errors()
    trial, plan = read_run(args, console)
    with console.status("computing the tightest bound"):
        found = bound(
            plan.requests,
            trial.tiers,
            trial.deployment.profile,
            trial.deployment.replicas,
            trial.deployment.facts.kv_tokens,
        )
    rate_rps, by = trial.rate_rps, trial.deployment
    rate_rps = len(plan.requests) / trial.duration_s if rate_rps is None else rate_rps
    if args.json:
        setup = {  # with the keys of `simulate --json`
            "profile": by.profile,
            "replicas": by.replicas,
            "workload": trial.workload,
            "tiers": trial.tiers.name,
            "rate_rps": rate_rps,
            "duration_s": trial.duration_s,
            "seed": trial.seed,
            "definition": trial.tiers.definition,
            "offered": len(plan.requests),
        }
        print_json(setup | msgspec.to_builtins(found))
        return 0
    out = output(120)
    print_table(out, _table(f"{rate_rps:.2f} requests/s, seed {trial.seed}", found))
    print_line(
        out,
        f"Every scheduler without speculation violates at least "
        f"{percent(found.violated_fraction)} of these {len(plan.requests)} requests "
        f"(definition {trial.tiers.definition}, {by.replicas} x {by.profile}; "
        f"computed in {found.wall_s:.1f} s).",
    )
    return 0


def _table(title: str, found: Bound) -> Table:
    heads = "relaxation|takes into account|>met at most|>violated at least"
    out = with_columns(Table(title=title, title_justify="left"), heads)
    for name, met in found.met_by.items():
        style = "bold" if name == found.by else ""
        out.add_row(name, ACCOUNTS[name], percent(met), percent(1 - met), style=style)
    return out
