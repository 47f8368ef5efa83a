"""What `load`, `simulate` and their kin offer: the words that describe a plan of requests, and the
plan, at any rate.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loadgen.load.arrivals import (
    SHAPES,
    draw_arrivals,
    parse_gaps,
    parse_profile,
    recorded_arrivals,
)
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.trace import Trace, read_trace
from loadgen.load.workload import WORKLOADS, LengthSource, Rows, named_workload
from shared.errors import ConfigError
from shared.tiers import BUILT_IN, TierSet, load_tiers


class Plan(NamedTuple):
    """What a run will offer. `notes` say what was left out or changed on the way."""

    requests: list[PlannedRequest]
    tiers: TierSet
    duration_s: float
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Demand:
    """What may be offered, before a rate is chosen: files are read once, however many rates are
    tried.
    """

    args: argparse.Namespace
    tiers: TierSet
    trace: Trace | None
    notes: Sequence[str]

    @property
    def name(self) -> str:
        """Of the trace, or of the workload."""
        return self.trace.name if self.trace is not None else str(self.args.workload)

    def at(self, rate_rps: float | None) -> Plan:
        """The plan at this rate; None: as recorded. Raises ConfigError."""
        args, trace, notes = self.args, self.trace, list(self.notes)
        if rate_rps is not None and not 0 < rate_rps < math.inf:
            raise ConfigError("--rate must be above 0")
        lengths: LengthSource
        if args.arrivals == "trace":
            if trace is None:
                raise ConfigError("--arrivals trace needs --trace FILE")
            if args.bursts is not None:
                raise ConfigError(
                    "--bursts goes with poisson and gamma arrivals; recorded ones have bursts of their own"
                )
            trace, squeeze = recorded_arrivals(trace, rate_rps, args.duration, args.seed)
            if squeeze > 1:
                notes.append(
                    f"time compressed {squeeze:.2f} times to reach {rate_rps:g} requests/s"
                )
            arrivals, lengths = (
                [row.arrival_s or 0.0 for row in trace.rows],
                Rows(trace, in_order=True),
            )
        else:
            profile = (
                parse_profile(args.bursts, args.duration)
                if args.bursts is not None
                else ((1.0, 1.0),)
            )
            gaps = parse_gaps(args.arrivals)
            lengths = (
                Rows(trace, in_order=False)
                if trace is not None
                else named_workload(args.workload, args.context)
            )
            if rate_rps is None:
                raise ConfigError("--rate is needed unless --arrivals is trace")
            arrivals = draw_arrivals(gaps, rate_rps, args.duration, args.seed, profile)
        if not arrivals:
            raise ConfigError("nothing arrives: raise --rate or --duration")
        requests = plan_requests(
            arrivals, lengths, self.tiers, args.seed, args.tenants, args.important
        )
        return Plan(requests, self.tiers, args.duration, notes)


def add_plan_arguments(
    parser: argparse.ArgumentParser, duration_s: float, *, needed: bool = True
) -> None:
    """`needed`: one of --trace and --workload must be given."""
    what = parser.add_mutually_exclusive_group(required=needed)
    what.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="csv or csv.gz: our normalised schema or Azure's own",
    )
    what.add_argument(
        "--workload", metavar="NAME", help=f"built-in lengths: {', '.join(WORKLOADS)}"
    )
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="requests per second (default with --arrivals trace: as recorded)",
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=duration_s,
        metavar="S",
        help=f"seconds of arrivals (default: {duration_s:g})",
    )
    parser.add_argument(
        "--arrivals",
        default="poisson",
        metavar="KIND",
        help="poisson, gamma:CV or trace (as recorded)",
    )
    parser.add_argument(
        "--bursts",
        metavar="PROFILE",
        help=f"multiples of the rate over time: SECONDS:MULTIPLE,... or a recorded shape: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--tiers",
        default="default",
        metavar="NAME|FILE",
        help=f"{', '.join(BUILT_IN)}, or a .toml or .json file",
    )
    parser.add_argument("--tenants", type=int, default=1, metavar="N")
    parser.add_argument(
        "--important",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="of requests, ten times as important",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="K", help="the same seed gives the same requests"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=8192,
        metavar="N",
        help="leave out requests of more tokens, prompt and output (default: 8192)",
    )


def make_plan(args: argparse.Namespace) -> Plan:
    """Everything about a live run that is decided beforehand. Raises ConfigError."""
    demand = read_demand(args)
    if any(
        bound is not None
        for tier in demand.tiers.tiers.values()
        for bound in (tier.slo.ttft_x, tier.slo.tbt_x, tier.slo.ttlt_x)
    ):
        raise ConfigError(
            f"tiers {demand.tiers.name}: bounds in multiples of zero-load time cannot be measured here; give seconds"
        )
    return demand.at(args.rate)


def read_demand(args: argparse.Namespace) -> Demand:
    """Checks what does not depend on the rate. Raises ConfigError."""
    _check(args)
    tiers = load_tiers(args.tiers)
    trace, notes = None, []
    if args.trace is not None:
        whole = read_trace(args.trace)
        trace = whole.within(args.context)
        if left_out := len(whole.rows) - len(trace.rows):
            notes.append(
                f"{left_out} of {len(whole.rows)} requests of the trace left out: longer than a context of {args.context} tokens"
            )
    return Demand(args, tiers, trace, notes)


def _check(args: argparse.Namespace) -> None:
    for name, value in (("--rate", args.rate), ("--duration", args.duration)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0")
    if not 0 <= args.important <= 1:
        raise ConfigError("--important is a fraction, 0 to 1")
    for name, value in (("--tenants", args.tenants), ("--context", args.context)):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more")
