"""`slackline search`: the settings of a policy that suit a load best, by capacity or by violations
at one rate.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.commands.capacity import FEWEST, Tried, check_fractions, in_words, try_rate
from loadgen.commands.plan_arguments import Demand, add_plan_arguments, read_demand
from loadgen.commands.trial_arguments import (
    add_policy_arguments,
    add_trial_arguments,
    make_trial,
    parse_settings,
)
from loadgen.lab.figures_table import named
from loadgen.lab.goodput import Probe, find_capacity
from loadgen.lab.grid import AtRate, Carried, best_first, combinations, own_grid, parse_grid
from loadgen.lab.parallel import check_jobs, cores, run_all
from loadgen.lab.trial import Trial
from loadgen.load.report import percent
from shared.errors import ConfigError

VIOLATIONS, PRECISION = 0.01, 0.03


class Searched(Tried, frozen=True, kw_only=True):
    """What `slackline search --json` prints; `settings` are those of every configuration.

    `violations` is null at one rate, `rate_rps` by capacity.
    """

    command: str = "search"
    grid: dict[str, list[str]]
    configurations: list[Carried | AtRate]  # best first
    violations: float | None
    rate_rps: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, duration_s=600.0)
    add_policy_arguments(parser)
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE,...",
        help="a setting and what to try for it; may be repeated: every combination is tried (for ascendra there is a default)",
    )
    add_trial_arguments(parser)
    parser.add_argument(
        "--violations",
        type=float,
        metavar="FRACTION",
        help=f"without --rate: by the rate at which so many of the offered requests are violated (default: {VIOLATIONS:g})",
    )
    parser.add_argument(
        "--precision",
        type=float,
        default=PRECISION,
        metavar="FRACTION",
        help=f"of that rate, relative (default: {PRECISION:g})",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=cores(),
        metavar="N",
        help="processes; results do not depend on it (default: all cores)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    if args.rate is not None and args.violations is not None:
        raise ConfigError(
            "give --rate, to search by what is violated at it, or --violations, to search by capacity; not both"
        )
    violations = VIOLATIONS if args.violations is None else args.violations
    check_fractions(violations, args.precision)
    began_s, jobs = time.perf_counter(), check_jobs(args.jobs)
    demand, fixed = read_demand(args), parse_settings(args.set)
    # what is wrong without any grid is told first
    make_trial(args, demand, args.policy, fixed, args.rate)
    grid = (
        parse_grid(args.grid, fixed) if args.grid else own_grid(args.policy, args.replicas, fixed)
    )
    tried = combinations(grid)
    trials = [
        make_trial(args, demand, args.policy, fixed | settings, args.rate) for settings in tried
    ]
    err = Console(stderr=True)
    for note in demand.notes if args.rate is None else demand.at(args.rate).notes:
        err.print(note, highlight=False)
    tasks: list[Callable[[], Carried | AtRate]] = []
    for trial, settings in zip(trials, tried, strict=True):
        if args.rate is not None:
            tasks.append(partial(at_rate, trial, demand, args.rate, settings))
        else:
            tasks.append(partial(carried, trial, demand, violations, args.precision, settings))
    found: dict[int, Carried | AtRate] = {}
    for number, one in run_all(tasks, jobs):
        found[number] = one
        if not args.json:
            err.print(
                f"[{len(found)}/{len(tasks)}] {line(args.policy, one)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    searched = Searched(
        grid=grid,
        configurations=best_first([found[number] for number in range(len(tasks))]),
        violations=None if args.rate is not None else violations,
        rate_rps=args.rate,
        **in_words(args, demand, fixed, began_s),
    )
    if args.json:
        print(msgspec.json.encode(searched).decode())
        return 0
    out = Console(width=None if sys.stdout.isatty() else 120)
    out.print(circumstances(searched), highlight=False, markup=False, soft_wrap=True)
    out.print(search_table(searched))
    return 0


def at_rate(trial: Trial, demand: Demand, rate_rps: float, settings: Mapping[str, str]) -> AtRate:
    """One configuration at one rate; perhaps in a process of its own."""
    requests = demand.at(rate_rps).requests
    return AtRate(
        settings=dict(settings),
        figures=trial.judge(requests, trial.serve(requests, keep_times=False)),
    )


def carried(
    trial: Trial, demand: Demand, violations: float, precision: float, settings: Mapping[str, str]
) -> Carried:
    """What one configuration carries."""
    probes: list[Probe] = []

    def probe(rate_rps: float) -> Probe:
        probes.append(try_rate(trial, demand, rate_rps, violations))
        return probes[-1]

    capacity_rps = find_capacity(
        probe, violations, precision, float(trial.replicas), lowest_rps=FEWEST / trial.duration_s
    )
    return Carried(settings=dict(settings), capacity_rps=capacity_rps, probes=probes)


def line(policy: str, one: Carried | AtRate) -> str:
    if isinstance(one, Carried):
        return f"{named(policy, one.settings)}: {one.capacity_rps:g} requests/s after {len(one.probes)} rates"
    return f"{named(policy, one.settings)}: {percent(one.figures.violated_fraction)} violated"


def circumstances(searched: Searched) -> str:
    """What all configurations have in common, in a line."""
    latency = (
        "no control latency"
        if searched.latency == "none"
        else f"control latency: {searched.latency}"
    )
    by = (
        f"at most {percent(searched.violations)} violated"
        if searched.violations is not None
        else f"{searched.rate_rps:g} requests/s"
    )
    return (
        f"{named(searched.policy, searched.settings)} on {searched.workload}, {by}; {searched.replicas} x {searched.profile}, tiers "
        f"{searched.tiers}, {searched.duration_s:g} s, seed {searched.seed}, {latency}; SLOs judged by {searched.definition}"
    )


def search_table(searched: Searched) -> Table:
    """A row each, best first."""
    out = Table(box=SIMPLE_HEAD)
    figures = (
        ("requests/s",)
        if searched.rate_rps is None
        else ("violated", "goodput, requests/s", "relegated", "offloaded")
    )
    for name in ("", *searched.grid, *figures):
        out.add_column(escape(name), justify="right")
    for place, one in enumerate(searched.configurations, start=1):
        if isinstance(one, Carried):
            shown = [f"{one.capacity_rps:g}"]
        else:
            of = one.figures
            shown = [
                percent(of.violated_fraction),
                f"{of.goodput_rps:.2f}",
                str(of.relegated),
                str(of.offloaded),
            ]
        out.add_row(str(place), *(escape(one.settings[key]) for key in searched.grid), *shown)
    return out
