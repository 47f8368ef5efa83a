"""`slackline load`: offer a plan of requests to a running fleet, and report what became of them."""

import argparse
import asyncio
import math
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from rich.console import Console

from loadgen.arrivals import SHAPES, draw_arrivals, parse_gaps, parse_profile, recorded_arrivals
from loadgen.cli import INTERRUPTED, default_url
from loadgen.load import Sender, run_load
from loadgen.mix import PlannedRequest, plan_requests
from loadgen.progress import progress
from loadgen.report import make_report, table, write_report
from loadgen.tally import Tally
from loadgen.trace import read_trace
from loadgen.workload import WORKLOADS, LengthSource, Rows, named_workload
from shared.client import Patience
from shared.clock import Clock
from shared.errors import ConfigError
from shared.tiers import BUILT_IN, TierSet, load_tiers

PATIENCE = Patience(silence_s=15.0)  # most of a burst waits its turn in silence: asking often would be load of another kind


class Plan(NamedTuple):
    """What a run will offer. `notes` say what was left out or changed on the way."""

    requests: list[PlannedRequest]
    tiers: TierSet
    duration_s: float
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="csv or csv.gz: our normalised schema or Azure's own")
    what.add_argument("--workload", metavar="NAME", help=f"built-in lengths: {', '.join(WORKLOADS)}")
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second (default with --arrivals trace: as recorded)")
    parser.add_argument("--duration", type=float, default=60.0, metavar="S", help="seconds of load (default: 60)")
    parser.add_argument("--arrivals", default="poisson", metavar="KIND", help="poisson, gamma:CV or trace (as recorded)")
    parser.add_argument(
        "--bursts",
        metavar="PROFILE",
        help=f"multiples of the rate over time: SECONDS:MULTIPLE,... or a recorded shape: {', '.join(SHAPES)}",
    )
    parser.add_argument("--tiers", default="default", metavar="NAME|FILE", help=f"{', '.join(BUILT_IN)}, or a .toml or .json file")
    parser.add_argument("--tenants", type=int, default=1, metavar="N")
    parser.add_argument("--important", type=float, default=0.0, metavar="FRACTION", help="of requests, ten times as important")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="the same seed gives the same requests")
    parser.add_argument(
        "--context", type=int, default=8192, metavar="N", help="leave out requests of more tokens, prompt and output (default: 8192)"
    )
    parser.add_argument("--wait", type=float, default=120.0, metavar="S", help="for what still runs when all is sent (default: 120)")
    parser.add_argument("--label", default="", help="what to call this run in tables, such as the policy's name")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there as JSON")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.add_argument("--http", metavar="URL", help="go through the gateway at this address instead of NATS")
    parser.add_argument("--model", help="with --http: the model's name (default: what the server has)")
    parser.add_argument("--url", default=default_url(), help="the NATS server (default: SLACKLINE_URL, else nats://127.0.0.1:4222)")


def run(args: argparse.Namespace) -> int:
    plan = make_plan(args)
    console = Console(stderr=True)
    for note in plan.notes:
        console.print(note, highlight=False)
    return uvloop.run(_run(args, plan, console))


def make_plan(args: argparse.Namespace) -> Plan:
    """Everything about the run that is decided beforehand. Raises ConfigError."""
    _check(args)
    tiers = load_tiers(args.tiers)
    if any(bound is not None for tier in tiers.tiers.values() for bound in (tier.slo.ttft_x, tier.slo.tbt_x, tier.slo.ttlt_x)):
        raise ConfigError(f"tiers {tiers.name}: bounds in multiples of zero-load time cannot be measured here; give seconds")
    trace, notes = None, []
    if args.trace is not None:
        whole = read_trace(args.trace)
        trace = whole.within(args.context)
        if left_out := len(whole.rows) - len(trace.rows):
            notes.append(f"{left_out} of {len(whole.rows)} requests of the trace left out: longer than a context of {args.context} tokens")
    lengths: LengthSource
    if args.arrivals == "trace":
        if trace is None:
            raise ConfigError("--arrivals trace needs --trace FILE")
        if args.bursts is not None:
            raise ConfigError("--bursts goes with poisson and gamma arrivals; recorded ones have bursts of their own")
        trace, squeeze = recorded_arrivals(trace, args.rate, args.duration, args.seed)
        if squeeze > 1:
            notes.append(f"time compressed {squeeze:.2f} times to reach {args.rate:g} requests/s")
        arrivals, lengths = [row.arrival_s or 0.0 for row in trace.rows], Rows(trace, in_order=True)
    else:
        if args.rate is None:
            raise ConfigError("--rate is needed unless --arrivals is trace")
        profile = parse_profile(args.bursts, args.duration) if args.bursts is not None else ((1.0, 1.0),)
        arrivals = draw_arrivals(parse_gaps(args.arrivals), args.rate, args.duration, args.seed, profile)
        lengths = Rows(trace, in_order=False) if trace is not None else named_workload(args.workload, args.context)
    if not arrivals:
        raise ConfigError("nothing arrives: raise --rate or --duration")
    requests = plan_requests(arrivals, lengths, tiers, args.seed, args.tenants, args.important)
    return Plan(requests, tiers, args.duration, notes)


def _check(args: argparse.Namespace) -> None:
    for name, value in (("--rate", args.rate), ("--duration", args.duration)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0")
    if not 0 <= args.important <= 1:
        raise ConfigError("--important is a fraction, 0 to 1")
    for name, value in (("--tenants", args.tenants), ("--context", args.context)):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more")
    if not 0 <= args.wait < math.inf:
        raise ConfigError("--wait must be 0 or more")
    if args.out is not None and not args.out.parent.is_dir():
        raise ConfigError(f"--out: there is no directory {args.out.parent}")


async def _run(args: argparse.Namespace, plan: Plan, console: Console) -> int:
    stop, clock, tally = asyncio.Event(), Clock(), Tally(plan.tiers)
    loop = asyncio.get_running_loop()
    async with _sender(args, plan, clock) as sender:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with progress(tally, len(plan.requests), plan.duration_s, args.label, console):
            stopped_s = await run_load(plan.requests, sender, tally, clock, stop, args.wait)
    report = make_report(
        tally,
        label=args.label,
        command=shlex.join(["slackline", *sys.argv[1:]]),
        transport="http" if args.http else "nats",
        seed=args.seed,
        planned=len(plan.requests),
        offered_s=plan.duration_s if stopped_s is None else stopped_s,
        interrupted=stop.is_set(),
        notes=plan.notes,
    )
    if args.out is not None:
        write_report(report, args.out)
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        out = Console(width=None if sys.stdout.isatty() else 180)
        out.print(table(report))
        for sample in report.error_samples:
            out.print(f"  {sample}", highlight=False, markup=False)
        out.print(f"sent late by {1000 * report.lateness_max_s:.1f} ms at most", highlight=False)
    if report.interrupted:
        return INTERRUPTED
    return 1 if report.total.errors == report.total.offered else 0  # not one answer: no figures, but a failure


@asynccontextmanager
async def _sender(args: argparse.Namespace, plan: Plan, clock: Clock) -> AsyncIterator[Sender]:
    if args.http:
        from loadgen.send_http import HttpSender

        http = HttpSender(args.http, args.model, plan.tiers, clock, seed=args.seed)
        try:
            await http.check()
            yield http
        finally:
            await http.close()
        return
    from loadgen.commands.connection import connected
    from loadgen.send_nats import NatsSender

    async with connected(args.url, "slackline-load", clock, PATIENCE) as client:
        longest = max(request.output_tokens for request in plan.requests)
        yield NatsSender(client, clock, seed=args.seed, longest_output=longest, context_tokens=args.context)
