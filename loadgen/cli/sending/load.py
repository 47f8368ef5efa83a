"""`slackline load`: offers a plan of requests to a running fleet and reports the outcome."""

import argparse
import asyncio
import math
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from rich.console import Console

from loadgen.access import access_of, add_access_arguments
from loadgen.cli.main import INTERRUPTED
from loadgen.cli.options.html import add_html_argument, check_html, write_reports
from loadgen.cli.options.option import add_options
from loadgen.cli.options.plan import Plan, add_plan_arguments, make_plan
from loadgen.load.heartbeats import Heartbeats, resolved_by
from loadgen.load.open_loop import Sender, run_load
from loadgen.load.progress import progress
from loadgen.load.report import (
    engine_time,
    make_report,
    percent,
    table,
    write_report,
    zero_gap_note,
)
from loadgen.load.tally import Tally
from loadgen.tables import errors, output, print_json, print_line, print_table
from shared.bus.users import OPERATOR
from shared.clock import Clock
from shared.errors import ConfigError

HTTP_CONTEXT = 8192  # tokens, where it is not given: a gateway does not tell
GONE_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, duration_s=60.0, of_fleet=True)
    add_options(
        parser,
        """
        --wait S = 120.0: wait at most S seconds after the last arrival for requests that still run
        --label LABEL =: name of this run in tables, such as the policy's name
        --out FILE: write the report to FILE as JSON
        --json: print the report as JSON instead of a table
        --http URL: send requests to the gateway at URL instead of over NATS, with the key in
            SLACKLINE_API_KEY if it wants one
        --model MODEL: model that all requests name (default: none)
        """,
    )
    add_html_argument(parser)
    add_access_arguments(parser, "the operator")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.wait < math.inf:
        raise ConfigError("--wait must be 0 or more")
    if args.out is not None and not args.out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {args.out.parent}")
    check_html(args.html)
    console = errors()
    asks = args.context is None and not args.http
    if args.context is None:
        args.context = HTTP_CONTEXT
    plan = make_plan(args)  # wrong arguments are told before the fleet is asked
    if asks:
        args.context = uvloop.run(_context_of_fleet(args))
        plan = make_plan(args)
    for note in plan.notes:
        console.print(note)
    return uvloop.run(_run(args, plan, console))


async def _run(args: argparse.Namespace, plan: Plan, console: Console) -> int:
    stop, clock, tally = asyncio.Event(), Clock(), Tally(plan.tiers)
    loop = asyncio.get_running_loop()
    async with _sender(args, plan, clock, tally) as (sender, heartbeats):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with progress(tally, len(plan.requests), plan.duration_s, args.label, console):
            watch = asyncio.ensure_future(_until_gone(heartbeats, stop))
            stopped_s = await run_load(plan.requests, sender, tally, clock, stop, args.wait)
            gone = watch.done()
            watch.cancel()
        if gone:
            console.print(f"stopped: no worker was heard for {GONE_S:g} s")
        engines = None if heartbeats is None else await heartbeats.spent()
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
        engines=engines,
    )
    if args.out is not None:
        write_report(report, args.out)
    if args.html is not None:
        write_reports([report], table(report), args.html)
    if args.json:
        print_json(report)
    else:
        out = output(120)
        print_table(out, table(report))
        if note := zero_gap_note(t.tbt.p50_s for t in (*report.tiers.values(), report.total)):
            print_line(out, note)
        for sample in report.error_samples:
            print_line(out, f"  {sample}")
        if report.cached_fraction is not None:
            print_line(out, f"{percent(report.cached_fraction)} of prompt tokens found in a cache")
        print_line(out, f"requests were sent at most {1000 * report.lateness_max_s:.1f} ms late")
        if report.engines is not None:
            print_line(out, engine_time(report.engines))
    if report.interrupted:
        return 1 if gone else INTERRUPTED
    # a run without a single answer has failed
    return 1 if report.total.errors == report.total.offered else 0


async def _context_of_fleet(args: argparse.Namespace) -> int:
    from loadgen.load.connection import LOAD_PATIENCE, connected

    async with connected(
        access_of(args), "slackline-load", OPERATOR, Clock(), LOAD_PATIENCE
    ) as client:
        heartbeats = Heartbeats(args.model)
        await heartbeats.listen(client.bus)
        return await heartbeats.context_tokens()


async def _until_gone(heartbeats: Heartbeats | None, stop: asyncio.Event) -> None:
    """Stop the load once no worker was heard for GONE_S. Over HTTP none ever is."""
    while heartbeats is None or heartbeats.silent_s < GONE_S:
        await asyncio.sleep(1.0)
    stop.set()


@asynccontextmanager
async def _sender(
    args: argparse.Namespace, plan: Plan, clock: Clock, tally: Tally
) -> AsyncIterator[tuple[Sender, Heartbeats | None]]:
    """The sender of the requests and, over NATS, the heartbeats of the workers."""
    in_multiples = any(tier.slo.in_multiples for tier in plan.tiers.tiers.values())
    if args.http:
        if in_multiples:
            raise ConfigError(
                f"--http: tiers {plan.tiers.name} have bounds in multiples of zero-load time, "
                "which the fleet tells over NATS alone; leave --http out"
            )
        if any(request.thinking_tokens for request in plan.requests):
            raise ConfigError(
                "--http: this workload thinks, and HTTP has no field for the number of thinking "
                "tokens; leave --http out to send over NATS"
            )
        from loadgen.load.send_http import HttpSender

        http = HttpSender(args.http, args.model, plan.tiers, clock, seed=args.seed)
        try:
            await http.check()
            yield http, None
        finally:
            await http.close()
        return
    from loadgen.load.connection import LOAD_PATIENCE, connected
    from loadgen.load.send_nats import NatsSender, cap_tokens

    access = access_of(args)
    async with connected(access, "slackline-load", OPERATOR, clock, LOAD_PATIENCE) as client:
        longest = max(request.output_tokens for request in plan.requests)
        heartbeats = Heartbeats(args.model)
        await heartbeats.listen(client.bus)
        if in_multiples:
            tally.resolve = resolved_by(
                await heartbeats.profile(),
                lambda planned: cap_tokens(longest, args.context, planned.prompt_tokens),
            )
        sender = NatsSender(
            client,
            clock,
            seed=args.seed,
            longest_output=longest,
            context_tokens=args.context,
            model=args.model,
        )
        yield sender, heartbeats
