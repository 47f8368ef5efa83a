"""The arguments that describe a plan of requests, and the plan at a given rate."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loadgen.cli.options.option import add_options
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
from shared.rules.tiers import BUILT_IN, TierSet, load_tiers

MOST_REQUESTS = 5_000_000  # of a plan: some minutes to draw, and gigabytes to keep


class Plan(NamedTuple):
    """The requests that a run offers. `notes` say what was left out or changed."""

    requests: list[PlannedRequest]
    tiers: TierSet
    duration_s: float
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Demand:
    """A plan before its rate is chosen. Files are read once, however many rates are tried."""

    args: argparse.Namespace
    tiers: TierSet
    trace: Trace | None
    notes: Sequence[str]

    @property
    def name(self) -> str:
        """The name of the trace or of the workload."""
        return self.trace.name if self.trace is not None else str(self.args.workload)

    def at(self, rate_rps: float | None) -> Plan:
        """The plan at this rate; None: at the rate of the trace. Raises ConfigError."""
        args, trace, notes = self.args, self.trace, list(self.notes)
        if rate_rps is not None and not 0 < rate_rps < math.inf:
            raise ConfigError("--rate must be above 0")
        lengths: LengthSource
        if args.arrivals == "trace":
            if trace is None:
                raise ConfigError("--arrivals trace needs --trace FILE")
            if args.bursts is not None:
                raise ConfigError(
                    "--bursts needs poisson or gamma arrivals: recorded ones have their own bursts"
                )
            trace, squeeze = recorded_arrivals(
                trace, rate_rps, args.duration, args.seed, args.jitter
            )
            if squeeze > 1:
                notes.append(
                    f"time is compressed {squeeze:.2f} times to reach {rate_rps:g} requests/s"
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
            mean = sum(s * multiple for s, multiple in profile) / sum(s for s, _ in profile)
            expected = rate_rps * args.duration * mean
            if expected > MOST_REQUESTS:
                raise ConfigError(
                    f"{expected:.2g} requests would arrive, and a plan has at most "
                    f"{MOST_REQUESTS:,}: lower --rate or --duration"
                )
            arrivals = draw_arrivals(gaps, rate_rps, args.duration, args.seed, profile)
        if not arrivals:
            raise ConfigError("no request arrives: raise --rate or --duration")
        requests = plan_requests(
            arrivals, lengths, self.tiers, args.seed, args.tenants, args.important
        )
        return Plan(requests, self.tiers, args.duration, notes)


RATE_HELP = "requests per second (default with --arrivals trace: the rate of the trace)"


def add_plan_arguments(
    parser: argparse.ArgumentParser,
    duration_s: float,
    *,
    needed: bool = True,
    rate_help: str = RATE_HELP,
    of_fleet: bool = False,
) -> None:
    """Adds the arguments of a plan. With `needed`, --trace or --workload must be given."""
    add_options(
        parser.add_mutually_exclusive_group(required=needed),
        f"""
        --trace FILE: recorded trace: CSV in our schema or in Azure's, or Mooncake's JSON lines;
            also as .gz
        --workload NAME: built-in distribution of lengths: {", ".join(WORKLOADS)}
        """,
    )
    add_options(
        parser,
        f"""
        --rate R (float): {rate_help}
        --duration S = {duration_s}: seconds of arrivals
        --arrivals KIND = poisson: gaps between arrivals: poisson, gamma:CV (CV: coefficient of
            variation), or trace, as recorded
        --jitter S = 0.0: move each recorded arrival by up to S seconds, where a trace's times are
            rounded (Mooncake's: 3)
        --bursts PROFILE: multiples of the rate over time, as SECONDS:MULTIPLE,..., or a recorded
            shape: {", ".join(SHAPES)} (default: a constant rate)
        --tenants N = 1: number of tenants that share the requests
        --important FRACTION = 0.0: fraction of requests that are ten times as important
        --seed K = 0: random seed; the same seed gives the same requests
        """,
    )
    add_of_model_argument(parser)
    add_tiers_argument(parser)
    add_context_argument(parser, of_fleet=of_fleet)


def add_tiers_argument(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        --tiers NAME|FILE = default: SLOs and their shares of the requests: {", ".join(BUILT_IN)},
            or a file: a configuration, or a set in TOML or JSON
        """,
    )


def add_context_argument(parser: argparse.ArgumentParser, *, of_fleet: bool = False) -> None:
    """Adds --context. `of_fleet`: left out, it is None here, and the fleet's own counts."""
    how = "(int)" if of_fleet else "= 8192"
    text = "leave out requests with more than N tokens of prompt and output"
    fleets = " (default: what the fleet has)" if of_fleet else ""
    add_options(parser, f"--context N {how}: {text}{fleets}")


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan of a live run. Raises ConfigError."""
    return read_demand(args).at(args.rate)


def read_demand(args: argparse.Namespace) -> Demand:
    """Reads the trace and the tiers, and checks all but the rate. Raises ConfigError."""
    _check(args)
    tiers = load_tiers(args.tiers)
    trace, notes = None, list[str]()
    if args.trace is not None:
        trace, notes = read_fitting(args.trace, args.context, args.of_model)
    return Demand(args, tiers, trace, notes)


def add_of_model_argument(parser: argparse.ArgumentParser) -> None:
    text = "--of-model NAME: with --trace: only the requests to this model (its column model)"
    add_options(parser, text)


def read_fitting(
    path: Path, context_tokens: int, model: str | None = None
) -> tuple[Trace, list[str]]:
    """A trace's requests that the context holds, and a note of the others. `model`: only those to
    this one. Raises ConfigError.
    """
    whole = read_trace(path)
    if model is not None:
        whole = whole.of_model(model)
    trace = whole.within(context_tokens)
    left_out = len(whole.rows) - len(trace.rows)
    note = (
        f"{left_out} of {len(whole.rows)} requests of the trace are left out: "
        f"they are longer than a context of {context_tokens} tokens"
    )
    notes = [note] if left_out else []
    if whole.failed:
        notes.append(f"rows of failed requests, without tokens, are left out: {whole.failed}")
    return trace, notes


def _check(args: argparse.Namespace) -> None:
    for name, value in (("--rate", args.rate), ("--duration", args.duration)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0")
    if not 0 <= args.jitter < math.inf:
        raise ConfigError("--jitter must be 0 or more")
    if not 0 <= args.important <= 1:
        raise ConfigError("--important is a fraction, 0 to 1")
    for name, value in (("--tenants", args.tenants), ("--context", args.context)):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more")
