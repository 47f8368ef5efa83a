"""`slackline compare`: policies side by side on identical arrivals, in virtual time.

It also puts reports of `slackline load --out` side by side.
"""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import product
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
from loadgen.trials.interval import interval
from loadgen.trials.parallel import check_jobs
from loadgen.writing import make_folder
from shared.errors import ConfigError

MOST_SEEDS = 100


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
        --seeds K..L: compare with each of these seeds, instead of --seed; each figure is then their
            mean, with its 95 %% interval
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
    rates, seeds = parse_rates(args), parse_seeds(args)
    if len(seeds) > 1 and (args.plots is not None or args.html is not None):
        raise ConfigError("--plots and --html show one seed: leave --seeds out")
    demand = read_demand(args)
    make_folder("--plots", args.plots)
    err = errors()
    offered, notes = [], dict.fromkeys(demand.notes)
    for rate_rps, args.seed in product(rates, seeds):
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
    every = [one.comparison for one in rounds]
    comparisons = every[:: len(seeds)]  # of the first seed
    by_seed = [every[n : n + len(seeds)] for n in range(0, len(every), len(seeds))]
    if args.plots is not None:
        # imported here: it takes half a second, and most comparisons make no plots
        from loadgen.trials.course_plots import write_plots

        for path in write_plots(rounds, demand.tiers, args.plots):
            err.print(f"wrote {path}")
    if args.html is not None:
        shown = comparison_table(by_seed, demand.tiers)
        command = shlex.join(["slackline", *sys.argv[1:]])
        write_rounds(rounds, demand.tiers, shown, command, args.html)
        err.print(f"wrote {args.html}", soft_wrap=True)
    if args.json:
        print_json(_json_report(args, demand, by_seed, seeds))
        return 0
    out = output(140)
    first = comparisons[0]
    title = circumstances(first.policies[0], None if len(rates) > 1 else first.rate_rps)
    if len(seeds) > 1:
        title = title.replace(f"seed {seeds[0]};", f"seeds {args.seeds} (means, 95 % intervals);")
    out.print(title, markup=False, soft_wrap=True)
    print_table(out, comparison_table(by_seed, demand.tiers))
    return 0


def parse_seeds(args: argparse.Namespace) -> Sequence[int]:
    """The seeds, ascending. Raises ConfigError."""
    if args.seeds is None:
        return [args.seed]
    found = re.fullmatch(r"(\d+)\.\.(\d+)", args.seeds)
    if found is None or not int(found[1]) < int(found[2]) <= int(found[1]) + MOST_SEEDS:
        raise ConfigError(
            f"--seeds `{args.seeds}`: expected the first and the last, such as 1..5, at most "
            f"{MOST_SEEDS} apart"
        )
    return range(int(found[1]), int(found[2]) + 1)


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
    args: argparse.Namespace, demand: Demand, by_seed: list[list[Comparison]], seeds: Sequence[int]
) -> dict[str, Any]:
    """The output of `--json`: the setup of all runs, then the results, by --rates and --seeds."""
    setup = {
        "command": "compare",
        "seed": seeds[0],
        "definition": judged_tiers(args, demand).definition,
        "profile": args.profile,
        "replicas": args.replicas,
        "latency": args.latency,
        "workload": demand.name,
        "tiers": demand.tiers.name,
        "duration_s": args.duration,
    }
    if len(seeds) == 1:
        results = [structs.asdict(comparison) for [comparison] in by_seed]
    else:
        setup["seeds"] = list(seeds)
        results = [
            {
                "rate_rps": runs[0].rate_rps,
                "violated_fraction": [
                    structs.asdict(interval([run.policies[n].violated_fraction for run in runs]))
                    for n in range(len(runs[0].policies))
                ],
                "runs": runs,
            }
            for runs in by_seed
        ]
    if args.rates is not None:
        return {**setup, "rates": results}
    return setup | results[0]
