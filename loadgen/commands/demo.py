"""`slackline demo`: streamed answers of a real model, then two policies under one and the same rush
of requests, side by side.
"""

import argparse
import asyncio
import logging
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog
import uvloop
from msgspec.structs import replace
from rich.console import Console

from loadgen.cli import INTERRUPTED
from loadgen.demo import questions as answers
from loadgen.demo import rush, story
from loadgen.demo.prompts import Prompts
from loadgen.demo.rush import Rush, capacity_per_s
from loadgen.fleet.fleet import Fleet, FleetSpec, torch_replicas
from loadgen.load.mix import PlannedRequest
from loadgen.load.report import DEFINITION, Report, percent, seconds, side_by_side, write_report
from shared.errors import ConfigError
from shared.models import shipped as models
from shared.perf.iteration_time import Profile
from shared.text.tokenizer import Tokenizer

Result = TypeVar("Result")

# LOAD: of what the replicas keep up with, in the mean; the bursts are 2.6 times that
DURATION_S, SEED, LOAD = 45.0, 3, 0.85
WORKLOAD, CONTEXT_TOKENS = "short-mix", 4096
QUICK = Rush(
    engine="sim",
    profile="a100-llama3-8b",
    workload=WORKLOAD,
    context_tokens=CONTEXT_TOKENS,
    replicas=2,
    rate=10.0,
    duration_s=2.0,
    seed=SEED,
    wait_s=20.0,
    pace=0.2,
)
FCFS_CHUNK_TOKENS = 2048  # the best of a sweep: docs/demo.md
POLICIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("fcfs", {"chunk_tokens": str(FCFS_CHUNK_TOKENS)}),
    ("qoserve", {}),
)
PLAIN_WIDTH = 120  # where there is no terminal to ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few requests on simulated engines, no torch: only whether it works",
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, metavar="K", help=f"of the requests (default: {SEED})"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="DIR",
        help="for reports and traces (default: out/demo)",
    )


def run(args: argparse.Namespace) -> int:
    # Ours are words for a person; of the bus, only what went wrong is of interest.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {args.out}: {error}") from error
    return uvloop.run(_until_told(args, console))


async def _until_told(args: argparse.Namespace, console: Console) -> int:
    """The whole demonstration, or as much of it as Ctrl-C allows; fleets are down when it
    returns.
    """
    work = asyncio.ensure_future(_demo(args, console))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        console.print("\nstopped; nothing is left running", highlight=False)
        return INTERRUPTED
    return 0


async def _demo(args: argparse.Namespace, console: Console) -> None:
    began_s, load, prompts = time.monotonic(), replace(QUICK, seed=args.seed), None
    if not args.quick:
        console.rule("1 of 2  A model answers")
        profile = await _on(answers.spec(), lambda fleet: answers.answer(fleet, console), console)
        load = _as_fast_as_here(load, profile)
        prompts = Prompts(Tokenizer.load(models.folder(models.DEFAULT)), args.seed)
    console.rule("2 of 2  A rush of requests")
    requests = load.requests()
    engines = "one replica" if load.replicas == 1 else "two replicas"
    share = (
        "on simulated engines"
        if args.quick
        else f"{100 * LOAD:.0f} % of what {engines} can keep up with on this machine"
    )
    console.print(
        f"{len(requests)} requests of three kinds in {load.duration_s:g} s, in bursts with the shape of a recorded trace: "
        f"{load.rate:.1f} a second in the mean, {share}. Twice the very same requests: in order of arrival (fcfs, with the best "
        f"chunk of a sweep, {FCFS_CHUNK_TOKENS} tokens), then by the slack that each has left (qoserve).",
        highlight=False,
    )
    reports = []
    for policy, settings in POLICIES:
        reports.append(await _round(policy, settings, load, requests, prompts, args, console))
    _show(reports, args.out, console)
    console.print(f"[dim]{time.monotonic() - began_s:.0f} s in all[/]", highlight=False)


def _as_fast_as_here(like: Rush, profile: Profile) -> Rush:
    """The same kinds of requests for torch engines, as many as `profile` says they keep up with."""
    torch = replace(
        like,
        engine="torch",
        profile="",
        replicas=torch_replicas(),
        duration_s=DURATION_S,
        wait_s=90.0,
        pace=1.0,
    )
    return replace(torch, rate=LOAD * torch.replicas * capacity_per_s(profile, torch.requests()))


async def _round(
    policy: str,
    settings: dict[str, str],
    load: Rush,
    requests: list[PlannedRequest],
    prompts: Prompts | None,
    args: argparse.Namespace,
    console: Console,
) -> Report:
    label = policy + "".join(
        f" {name.removesuffix('_tokens')} {value}" for name, value in settings.items()
    )
    trace = (args.out / f"trace-{policy}.jsonl").absolute()
    trace.unlink(missing_ok=True)
    console.print(f"\n[bold]{label}[/]", highlight=False)
    command = shlex.join(["slackline", *sys.argv[1:]])
    report = await _on(
        rush.spec(policy, settings, load, trace),
        lambda fleet: rush.serve(fleet, label, load, requests, prompts, command, console),
        console,
    )
    for note in report.notes:
        console.print(f"  {note}", highlight=False, style="dim")
    write_report(report, args.out / f"{policy}.json")
    return report


async def _on(
    spec: FleetSpec, work: Callable[[Fleet], Coroutine[Any, Any, Result]], console: Console
) -> Result:
    """Do `work` on a fleet of its own, which is gone afterwards. Raises what ends either of
    them.
    """
    console.print(
        f"[dim]starting nats-server, admission, planner, relegation, {spec.replicas} x {spec.engine} worker ...[/]",
        highlight=False,
    )
    async with Fleet(
        spec, lambda line: console.print(line, highlight=False, markup=False)
    ) as fleet:
        task = asyncio.ensure_future(work(fleet))
        try:
            await asyncio.wait((task, fleet.failed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                fleet.failed.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _show(reports: list[Report], out: Path, console: Console) -> None:
    console.rule("What came of it")
    console.print(side_by_side(reports))
    console.print(_in_words(reports), highlight=False)
    console.print(f"\n[dim]{DEFINITION}[/]\n", highlight=False)
    path = out / "trace-qoserve.jsonl"
    traces = story.read_traces(path)
    chosen = story.richest(traces)
    if chosen is not None:
        console.print(story.timeline(chosen, traces[chosen]))
    console.print(
        f"\nreports  {out}/fcfs.json, {out}/qoserve.json  (slackline compare {out}/*.json)",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"traces   {path}, one span a line; the one above: {chosen}",
        highlight=False,
        soft_wrap=True,
    )


def _in_words(reports: list[Report]) -> str:
    """What the table says, for someone who has never seen one like it."""
    fcfs, qoserve = reports
    first = next(iter(fcfs.tiers))
    before, after = fcfs.tiers[first], qoserve.tiers[first]
    lost, kept = fcfs.total.offered - fcfs.total.met, qoserve.total.offered - qoserve.total.met
    if kept >= lost:
        return (
            "\nToo little load to tell the policies apart, or a machine too busy with other things."
        )
    given_up = (
        f", and a request that cannot make it any more is told so early and finished with what is left over "
        f"({qoserve.total.relegated} here: the slow end of the times above) rather than making others late"
        if qoserve.total.relegated
        else ""
    )
    words = (
        f"\nThe same engines, the same {fcfs.total.offered} requests. In the bursts more came than the engines can do at once. In order of "
        f"arrival, {first} callers waited behind long prompts that had a minute to spare: {percent(before.met_fraction)} of them got "
        f"what they were promised. By slack it was {percent(after.met_fraction)}: whoever has time waits, chunks grow while nobody "
        f"is in a hurry and shrink when a token is due{given_up}. "
        f"Broken promises: {lost} with fcfs, {kept} with qoserve."
    )
    bound_s = after.slo.tbt_s if after.slo else None
    if bound_s is not None and after.tbt.p99_s is not None and after.tbt.p99_s > bound_s:
        words += f" Gaps of more than {seconds(bound_s)} there are mostly slack well spent: the tokens before them had come early."
    return words
