"""`slackline search`: ranks the settings of a policy, by capacity or by violations at one rate."""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from loadgen.cli.options.common import add_jobs_argument, parse_pairs
from loadgen.cli.options.option import add_options
from loadgen.cli.options.plan import Demand, add_plan_arguments, read_demand
from loadgen.cli.options.trial import add_policy_arguments, add_trial_arguments, make_trial
from loadgen.cli.simulated.capacity import (
    Setup,
    add_precision_argument,
    check_fractions,
    searched,
    setup_fields,
)
from loadgen.load.report import percent
from loadgen.tables import errors, output, print_json, print_table
from loadgen.trials.figures import figures_of
from loadgen.trials.figures_table import named
from loadgen.trials.grid import AtRate, Carried, best_first, combinations, own_grid, parse_grid
from loadgen.trials.parallel import check_jobs, run_all
from loadgen.trials.remaining import Remaining
from loadgen.trials.trial import Trial
from shared.errors import ConfigError

VIOLATIONS, PRECISION = 0.01, 0.03


class SearchReport(Setup, frozen=True, kw_only=True):
    """The output of `slackline search --json`. `settings` are those that all configurations share.

    `violations` is null in a search at one rate, `rate_rps` in a search by capacity.
    """

    command: str = "search"
    grid: dict[str, list[str]]
    configurations: list[Carried | AtRate]  # best first
    violations: float | None
    rate_rps: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(
        parser,
        duration_s=600.0,
        rate_help="rank by violations at this rate, in requests per second "
        "(default: rank by capacity)",
    )
    add_policy_arguments(parser)
    add_options(
        parser,
        f"""
        --grid KEY=VALUE,VALUE,... (repeated): a setting and its values to try; may be repeated;
            every combination is tried (default: for ascendra the mixes of its pools, for other
            policies none)
        --violations FRACTION (float): without --rate, rank by capacity: the highest rate at which
            at most this fraction of the offered requests is violated (default: {VIOLATIONS:g})
        --json: print JSON instead of a table
        """,
    )
    add_trial_arguments(parser)
    add_precision_argument(parser, PRECISION)
    add_jobs_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.rate is not None and args.violations is not None:
        raise ConfigError(
            "give either --rate, to rank by violations at that rate, or --violations, "
            "to rank by capacity, not both"
        )
    violations = VIOLATIONS if args.violations is None else args.violations
    check_fractions(violations, args.precision)
    began_s, jobs = time.perf_counter(), check_jobs(args.jobs)
    demand, fixed = read_demand(args), parse_pairs("--set", args.set)
    # reports errors of the fixed settings before those of the grid
    make_trial(args, demand, args.policy, fixed, args.rate)
    grid = (
        parse_grid(args.grid, fixed) if args.grid else own_grid(args.policy, args.replicas, fixed)
    )
    varied = combinations(grid)
    trials = [
        make_trial(args, demand, args.policy, fixed | settings, args.rate) for settings in varied
    ]
    err = errors()
    for note in demand.notes if args.rate is None else demand.at(args.rate).notes:
        err.print(note)
    tasks: list[Callable[[], Carried | AtRate]] = []
    for trial, settings in zip(trials, varied, strict=True):
        if args.rate is not None:
            tasks.append(partial(at_rate, trial, demand, args.rate, settings))
        else:
            tasks.append(partial(by_capacity, trial, demand, violations, args.precision, settings))
    results: dict[int, Carried | AtRate] = {}
    remaining = Remaining(len(tasks))
    if not args.json:
        err.print(f"{len(tasks)} configurations, {jobs} at a time")
    for number, result in run_all(tasks, jobs):
        results[number], so_far = result, remaining.one_done()
        if not args.json:
            err.print(f"{so_far} {line(args.policy, result)}", markup=False, soft_wrap=True)
    report = SearchReport(
        grid=grid,
        configurations=best_first([results[number] for number in range(len(tasks))]),
        violations=None if args.rate is not None else violations,
        rate_rps=args.rate,
        **setup_fields(args, demand, fixed, trials[0].deployment.draft, began_s),
    )
    if args.json:
        print_json(report)
        return 0
    out = output(120)
    out.print(setup_line(report), markup=False, soft_wrap=True)
    print_table(out, search_table(report))
    return 0


def at_rate(trial: Trial, demand: Demand, rate_rps: float, settings: Mapping[str, str]) -> AtRate:
    """One configuration at one rate. A task: it may run in a process of its own."""
    requests = demand.at(rate_rps).requests
    return AtRate(
        settings=dict(settings),
        figures=figures_of(trial, requests, trial.serve(requests, keep_times=False)),
    )


def by_capacity(
    trial: Trial, demand: Demand, violations: float, precision: float, settings: Mapping[str, str]
) -> Carried:
    """The capacity of one configuration. A task: it may run in a process of its own."""
    capacity_rps, probes = searched(trial, demand, violations, precision)
    return Carried(settings=dict(settings), capacity_rps=capacity_rps, probes=probes)


def line(policy: str, result: Carried | AtRate) -> str:
    name = named(policy, result.settings)
    if isinstance(result, Carried):
        return f"{name}: {result.capacity_rps:g} requests/s after {len(result.probes)} rates"
    return f"{name}: {percent(result.figures.violated_fraction)} violated"


def setup_line(report: SearchReport) -> str:
    """The setup that all configurations share, in a line."""
    ranked_by = (
        f"at most {percent(report.violations)} violated"
        if report.violations is not None
        else f"{report.rate_rps:g} requests/s"
    )
    return (
        f"{named(report.policy, report.settings)} on {report.workload}, {ranked_by}; "
        f"{report.in_words}"
    )


def search_table(report: SearchReport) -> Table:
    """A row for each configuration, best first."""
    out = Table(box=SIMPLE_HEAD)
    figures = (
        ("requests/s",)
        if report.rate_rps is None
        else ("violated", "goodput, requests/s", "relegated", "offloaded")
    )
    for name in ("", *report.grid, *figures):
        out.add_column(escape(name), justify="right")
    for rank, result in enumerate(report.configurations, start=1):
        if isinstance(result, Carried):
            cells = [f"{result.capacity_rps:g}"]
        else:
            measured = result.figures
            cells = [
                percent(measured.violated_fraction),
                f"{measured.goodput_rps:.2f}",
                str(measured.relegated),
                str(measured.offloaded),
            ]
        out.add_row(str(rank), *(escape(result.settings[key]) for key in report.grid), *cells)
    return out
