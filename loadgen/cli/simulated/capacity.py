"""`slackline capacity`: the highest rate at which few enough requests are violated."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from loadgen.cli.options.common import parse_pairs
from loadgen.cli.options.option import add_options
from loadgen.cli.options.plan import Demand, add_plan_arguments, read_demand
from loadgen.cli.options.trial import (
    add_policy_arguments,
    add_trial_arguments,
    judged_tiers,
    make_trial,
)
from loadgen.load.report import percent
from loadgen.load.session import sessions
from loadgen.tables import errors, output, print_json, print_line, print_table, with_columns
from loadgen.trials.figures_table import named
from loadgen.trials.goodput import Probe, find_capacity
from loadgen.trials.remaining import search_left
from loadgen.trials.trial import Trial, most_missed
from shared.errors import ConfigError
from shared.perf.draft import DraftCost

FINEST = 0.001  # the least --precision, relative: rates have four digits
FEWEST_REQUESTS = 10  # roughly, in the run at the lowest rate that is tried


class Setup(Struct, frozen=True, kw_only=True):
    """The setup that all runs of a command share, as `--json` prints it here and in search.py."""

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
    draft: DraftCost
    acceptance: float
    wall_s: float

    @property
    def in_words(self) -> str:
        latency = (
            "no control latency" if self.latency == "none" else f"control latency: {self.latency}"
        )
        return (
            f"{self.replicas} x {self.profile}, tiers {self.tiers}, {self.duration_s:g} s, "
            f"seed {self.seed}, {latency}; SLOs judged by {self.definition}"
        )


class CapacityReport(Setup, frozen=True, kw_only=True):
    """The output of `slackline capacity --json`. `capacity_rps` 0: even the lowest rate failed."""

    capacity_rps: float
    violations: float
    precision: float
    probes: list[Probe]  # in the order of the search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(
        parser,
        duration_s=600.0,
        rate_help="requests per second that the search tries first (default: 1 per replica)",
    )
    add_policy_arguments(parser)
    add_trial_arguments(parser)
    add_options(
        parser,
        """
        --violations FRACTION = 0.01: fraction of the offered requests that may be violated
        --json: print JSON instead of a table
        """,
    )
    add_precision_argument(parser, 0.01)


def add_precision_argument(parser: argparse.ArgumentParser, default: float) -> None:
    text = "relative precision of the capacity: the search stops once its bounds are this close"
    add_options(parser, f"--precision FRACTION = {default}: {text}")


def run(args: argparse.Namespace) -> int:
    check_fractions(args.violations, args.precision)
    began_s = time.perf_counter()
    demand = read_demand(args)
    trial = make_trial(args, demand, args.policy, parse_pairs("--set", args.set), args.rate)
    console = errors()
    for note in demand.notes:
        console.print(note)

    def show(probes: Sequence[Probe]) -> None:
        if not args.json:
            left = search_left(probes, args.violations, args.precision, began_s)
            console.print(line(probes[-1]) + left)

    capacity_rps, probes = searched(trial, demand, args.violations, args.precision, show)
    report = CapacityReport(
        capacity_rps=capacity_rps,
        violations=args.violations,
        precision=args.precision,
        probes=probes,
        **setup_fields(args, demand, trial.deployment.settings, trial.deployment.draft, began_s),
    )
    if args.json:
        print_json(report)
        return 0
    out = output(120)
    print_table(out, probes_table(report))
    print_line(
        out,
        Text.assemble(
            (f"{report.capacity_rps:g} requests/s", "bold"),
            f" with {named(report.policy, report.settings)} and at most "
            f"{percent(report.violations)} violated, within {percent(report.precision)}\n"
            f"{report.in_words}",
        ),
    )
    return 0


def check_fractions(violations: float, precision: float) -> None:
    """Raises ConfigError unless both are fractions in range."""
    for name, value, least in (
        ("--violations", violations, 0.0),
        ("--precision", precision, FINEST),
    ):
        if not least <= value < 1:
            raise ConfigError(f"{name} is a fraction, {least:g} or more and below 1")


def setup_fields(
    args: argparse.Namespace,
    demand: Demand,
    settings: Mapping[str, str],
    draft: DraftCost,
    began_s: float,
) -> dict[str, Any]:
    """The fields of Setup for a command that began at `began_s` (time.perf_counter())."""
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
        "definition": judged_tiers(args, demand).definition,
        "latency": args.latency,
        "draft": draft,
        "acceptance": args.acceptance,
        "wall_s": time.perf_counter() - began_s,
    }


def searched(
    trial: Trial,
    demand: Demand,
    violations: float,
    precision: float,
    show: Callable[[Sequence[Probe]], None] = lambda _: None,
) -> tuple[float, list[Probe]]:
    """The capacity, and the rates tried, in that order; the trial's own rate comes first."""
    probes: list[Probe] = []

    def probe(rate_rps: float) -> Probe:
        probes.append(try_rate(trial, demand, rate_rps, violations))
        show(probes)
        return probes[-1]

    first_rps = float(trial.deployment.replicas) if trial.rate_rps is None else trial.rate_rps
    lowest_rps = FEWEST_REQUESTS / trial.duration_s
    return find_capacity(probe, violations, precision, first_rps, lowest_rps), probes


def try_rate(trial: Trial, demand: Demand, rate_rps: float, violations: float) -> Probe:
    """One run at one rate.

    The run stops as soon as more than `violations` of its requests are violated, since overloaded
    runs take longest. If sessions have rounds, sessions are counted instead of requests; they are
    known only at the end, so such a run is not stopped.
    """
    requests = demand.at(rate_rps).requests
    most = most_missed(requests, violations)
    result = replace(trial, rate_rps=rate_rps).serve(requests, keep_times=False, most_missed=most)
    # in a run that was stopped, a request that had not ended might still have met its SLO
    violated = np.array([not (result.stopped if v is None else v.slo_met) for v in result.verdicts])
    if not result.stopped and (by_session := sessions(requests, violated)) is not None:
        return Probe(
            rate_rps=rate_rps,
            offered=by_session.offered,
            violated_fraction=by_session.violated_fraction,
            stopped=False,
        )
    return Probe(
        rate_rps=rate_rps,
        offered=len(requests),
        violated_fraction=int(violated.sum()) / len(requests),
        stopped=result.stopped,
    )


def line(probe: Probe) -> str:
    more = "over " if probe.stopped else ""
    return (
        f"{probe.rate_rps:g} requests/s: "
        f"{more}{percent(probe.violated_fraction)} of {probe.offered} requests violated"
    )


def probes_table(report: CapacityReport) -> Table:
    """A row for each rate, in the order of the rates."""
    out = with_columns(Table(box=SIMPLE_HEAD), ">requests/s|>offered|>violated|>")
    for probe in sorted(report.probes, key=lambda probe: probe.rate_rps):
        kept = probe.violated_fraction <= report.violations
        fraction = ("> " if probe.stopped else "") + percent(probe.violated_fraction)
        out.add_row(
            f"{probe.rate_rps:g}", str(probe.offered), fraction, "kept" if kept else "too many"
        )
    return out
