"""`slackline capacity`: the highest rate at which a policy violates no more than a given fraction
of the requests.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.commands.plan_arguments import Demand, add_plan_arguments, read_demand
from loadgen.commands.trial_arguments import (
    add_policy_arguments,
    add_trial_arguments,
    make_trial,
    parse_settings,
)
from loadgen.lab.figures_table import named
from loadgen.lab.goodput import Probe, find_capacity
from loadgen.lab.trial import Trial
from loadgen.load.definition import Missed, missed
from loadgen.load.report import percent
from loadgen.load.session import has_rounds, sessions
from shared.errors import ConfigError

FINEST = 0.001  # relative; rates are tried to four digits
FEWEST = 10  # requests in a run, about: the lowest rate tried offers no fewer


class Tried(Struct, frozen=True, kw_only=True):
    """What `--json` says of all the runs of a command, here and in search.py."""

    policy: str
    settings: dict[str, str]
    profile: str
    replicas: int
    workload: str
    tiers: str
    seed: int
    duration_s: float
    arrivals: str
    definition: str
    latency: str
    draft: float
    acceptance: float
    wall_s: float


class Found(Tried, frozen=True, kw_only=True):
    """What `slackline capacity --json` prints. `capacity_rps` 0: even the lowest rate tried
    failed.
    """

    capacity_rps: float
    violations: float
    precision: float
    probes: list[Probe]  # in the order in which they were tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, duration_s=600.0)
    add_policy_arguments(parser)
    add_trial_arguments(parser)
    parser.add_argument(
        "--violations",
        type=float,
        default=0.01,
        metavar="FRACTION",
        help="of the offered requests (default: 0.01)",
    )
    parser.add_argument(
        "--precision",
        type=float,
        default=0.01,
        metavar="FRACTION",
        help="stop at bounds so close (default: 0.01)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    check_fractions(args.violations, args.precision)
    began_s = time.perf_counter()
    demand = read_demand(args)
    trial = make_trial(args, demand, args.policy, parse_settings(args.set), args.rate)
    console = Console(stderr=True)
    for note in demand.notes:
        console.print(note, highlight=False)
    probes: list[Probe] = []

    def probe(rate_rps: float) -> Probe:
        made = try_rate(trial, demand, rate_rps, args.violations)
        probes.append(made)
        if not args.json:
            console.print(line(made), highlight=False)
        return made

    first_rps = args.rate if args.rate is not None else float(args.replicas)
    capacity_rps = find_capacity(
        probe, args.violations, args.precision, first_rps, lowest_rps=FEWEST / args.duration
    )
    found = Found(
        capacity_rps=capacity_rps,
        violations=args.violations,
        precision=args.precision,
        probes=probes,
        **in_words(args, demand, trial.settings, began_s),
    )
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    out = Console(width=None if sys.stdout.isatty() else 120)
    out.print(probes_table(found))
    latency = (
        "no control latency" if found.latency == "none" else f"control latency: {found.latency}"
    )
    out.print(
        f"[bold]{found.capacity_rps:g} requests/s[/] with {escape(named(found.policy, found.settings))} and at most "
        f"{percent(found.violations)} violated, within {percent(found.precision)}\n{found.replicas} x {escape(found.profile)}, "
        f"tiers {escape(found.tiers)}, {found.duration_s:g} s, seed {found.seed}, {latency}; SLOs judged by {found.definition}",
        highlight=False,
    )
    return 0


def check_fractions(violations: float, precision: float) -> None:
    """Raises ConfigError."""
    for name, value, least in (
        ("--violations", violations, 0.0),
        ("--precision", precision, FINEST),
    ):
        if not least <= value < 1:
            raise ConfigError(f"{name} is a fraction, {least:g} or more and below 1")


def in_words(
    args: argparse.Namespace, demand: Demand, settings: Mapping[str, str], began_s: float
) -> dict[str, Any]:
    """The fields of Tried, of a command that began at `began_s` (time.perf_counter())."""
    return {
        "policy": args.policy,
        "settings": dict(settings),
        "profile": args.profile,
        "replicas": args.replicas,
        "workload": demand.name,
        "tiers": demand.tiers.name,
        "seed": args.seed,
        "duration_s": args.duration,
        "arrivals": args.arrivals,
        "definition": args.definition,
        "latency": args.latency,
        "draft": args.draft,
        "acceptance": args.acceptance,
        "wall_s": time.perf_counter() - began_s,
    }


def try_rate(trial: Trial, demand: Demand, rate_rps: float, violations: float) -> Probe:
    """The run stops as soon as it is known to fail: overloaded runs take longest. Of rounds the
    sessions count, known at the end only.
    """
    requests = demand.at(rate_rps).requests
    most = None if has_rounds(requests) else int(violations * len(requests) + 1e-9)
    result = replace(trial, rate_rps=rate_rps).serve(requests, keep_times=False, most_missed=most)
    broke = (
        missed(trial.definition, result.verdicts, result.slos, result.token_unix_s)
        != Missed.NOTHING
    )
    if result.stopped:  # who had not ended yet may have met its SLO
        broke &= np.array([verdict is not None for verdict in result.verdicts])
    elif (whole := sessions(requests, broke)) is not None:
        return Probe(
            rate_rps=rate_rps,
            offered=whole.offered,
            violated_fraction=whole.violated_fraction,
            stopped=False,
        )
    return Probe(
        rate_rps=rate_rps,
        offered=len(requests),
        violated_fraction=int(broke.sum()) / len(requests),
        stopped=result.stopped,
    )


def line(probe: Probe) -> str:
    more = "over " if probe.stopped else ""
    return f"{probe.rate_rps:g} requests/s: {more}{percent(probe.violated_fraction)} of {probe.offered} requests violated"


def probes_table(found: Found) -> Table:
    """Rates in order, so that the limit is seen."""
    out = Table(box=SIMPLE_HEAD)
    for name in ("requests/s", "offered", "violated", ""):
        out.add_column(name, justify="right")
    for probe in sorted(found.probes, key=lambda probe: probe.rate_rps):
        kept = probe.violated_fraction <= found.violations
        fraction = ("> " if probe.stopped else "") + percent(probe.violated_fraction)
        out.add_row(
            f"{probe.rate_rps:g}", str(probe.offered), fraction, "kept" if kept else "too many"
        )
    return out
