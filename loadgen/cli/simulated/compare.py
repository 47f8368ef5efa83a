"""`slackline compare`: policies side by side on identical arrivals, in virtual time.

It also puts reports of `slackline load --out` side by side.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from msgspec import structs
from rich.console import Console

from loadgen.cli.options.common import add_jobs_argument, add_plots_argument
from loadgen.cli.options.html import add_html_argument, check_html, write_reports, write_rounds
from loadgen.cli.options.option import add_options
from loadgen.cli.options.plan import Demand, add_plan_arguments, read_demand
from loadgen.cli.options.trial import add_trial_arguments, judged_tiers, make_trial
from loadgen.load.report import DEFINITION, read_report, side_by_side, unlike
from loadgen.tables import errors, output, print_json, print_table
from loadgen.trials.comparison import Comparison, Offered, compare, parse_policies
from loadgen.trials.comparison_table import comparison_table
from loadgen.trials.figures_table import circumstances
from loadgen.trials.parallel import check_jobs
from loadgen.writing import make_folder
from shared.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reports",
        nargs="*",
        type=Path,
        metavar="REPORT",
        help="reports written by `slackline load --out`, instead of all options below",
    )
    add_plan_arguments(parser, duration_s=600.0, needed=False)
    add_options(
        parser,
        """
        --policies NAME[:KEY=VALUE[+KEY=VALUE...]],...: policies to compare, with or without
            settings, such as edf,fcfs:chunk_tokens=512; a + joins settings, as in
            qoserve:alpha_high_s=0.004+safety=1.1
        --rates R,R,...: compare at each of these rates, instead of --rate
        --json: print JSON instead of a table
        """,
    )
    add_trial_arguments(parser)
    add_plots_argument(parser)
    add_jobs_argument(parser)
    add_html_argument(parser)


def run(args: argparse.Namespace) -> int:
    check_html(args.html)
    planned = args.policies is not None or args.trace is not None or args.workload is not None
    if args.reports and planned:
        raise ConfigError(
            "give either reports, or --policies with a --trace or --workload, not both"
        )
    if args.reports:
        return _reports(args)
    if args.policies is None or (args.trace is None and args.workload is None):
        raise ConfigError(
            "give reports of `slackline load --out`, or --policies with a --trace or --workload"
        )
    return _policies(args)


def _reports(args: argparse.Namespace) -> int:
    if args.json or args.plots is not None:
        raise ConfigError("--json and --plots need --policies; reports are JSON already")
    console = Console()
    reports = [read_report(path) for path in args.reports]
    print_table(console, side_by_side(reports))
    if args.html is not None:
        write_reports(reports, side_by_side(reports), args.html)
        console.print(f"wrote {args.html}", soft_wrap=True)
    if different := unlike(reports):
        console.print(
            f"These runs have different {different}: "
            "their figures say little about what served them.",
            style="bold",
        )
    console.print(DEFINITION, style="dim")
    return 0


def _policies(args: argparse.Namespace) -> int:
    jobs = check_jobs(args.jobs)
    policies = parse_policies(args.policies)
    rates = parse_rates(args)
    demand = read_demand(args)
    make_folder("--plots", args.plots)
    err = errors()
    offered, notes = [], dict.fromkeys(demand.notes)
    for rate_rps in rates:
        trials = [
            make_trial(args, demand, policy, settings, rate_rps) for policy, settings in policies
        ]
        plan = demand.at(rate_rps)
        notes |= dict.fromkeys(plan.notes)
        offered.append(
            Offered(
                rate_rps if rate_rps is not None else len(plan.requests) / plan.duration_s,
                plan.requests,
                trials,
            )
        )
    for note in notes:
        err.print(note)
    rounds = compare(
        offered,
        jobs,
        latencies=args.plots is not None or args.html is not None,
        show=lambda line: None if args.json else err.print(line),
    )
    comparisons = [one.comparison for one in rounds]
    if args.plots is not None:
        # imported here: it takes half a second, and most comparisons make no plots
        from loadgen.trials.course_plots import write_plots

        for path in write_plots(rounds, demand.tiers, args.plots):
            err.print(f"wrote {path}")
    if args.html is not None:
        shown = comparison_table(comparisons, demand.tiers)
        command = shlex.join(["slackline", *sys.argv[1:]])
        write_rounds(rounds, demand.tiers, shown, command, args.html)
        err.print(f"wrote {args.html}", soft_wrap=True)
    if args.json:
        print_json(_json_report(args, demand, comparisons))
        return 0
    out = output(140)
    out.print(
        circumstances(
            comparisons[0].policies[0], None if len(comparisons) > 1 else comparisons[0].rate_rps
        ),
        markup=False,
        soft_wrap=True,
    )
    print_table(out, comparison_table(comparisons, demand.tiers))
    return 0


def parse_rates(args: argparse.Namespace) -> list[float | None]:
    """The rates, ascending; None: the trace's. Raises ConfigError unless above 0 and different."""
    if args.rates is None:
        return [args.rate]
    if args.rate is not None:
        raise ConfigError("give either --rate or --rates")
    try:
        rates = [float(word) for word in args.rates.split(",")]
    except ValueError:
        rates = []
    if not rates or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(
            f"--rates `{args.rates}`: expected different rates above 0, such as 2,3,4"
        )
    return [*sorted(rates)]


def _json_report(
    args: argparse.Namespace, demand: Demand, comparisons: list[Comparison]
) -> dict[str, Any]:
    """The output of `--json`: the setup of all runs, then the results, by --rates."""
    setup = {
        "command": "compare",
        "seed": args.seed,
        "definition": judged_tiers(args, demand).definition,
        "profile": args.profile,
        "replicas": args.replicas,
        "latency": args.latency,
        "workload": demand.name,
        "tiers": demand.tiers.name,
        "duration_s": args.duration,
    }
    if args.rates is not None:
        return {**setup, "rates": comparisons}
    [comparison] = comparisons
    return {**setup, **structs.asdict(comparison)}
