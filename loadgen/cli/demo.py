"""`slackline demo`: a real model answers; then two policies serve the same rush of requests."""

import argparse
import asyncio
import dataclasses
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop
from msgspec.structs import replace
from rich.console import Console

from loadgen.bench import machine
from loadgen.cli.main import INTERRUPTED
from loadgen.cli.options.option import add_options
from loadgen.demo import questions, rush
from loadgen.demo.prompts import Prompts
from loadgen.demo.rush import TIERS, Rush, capacity_per_s
from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.fleet.gpus import torch_replicas
from loadgen.load.connection import quiet_logs
from loadgen.load.report import DEFINITION, Report, percent, side_by_side, write_report
from loadgen.tables import output, print_table
from loadgen.writing import make_folder
from shared.models import shipped as models
from shared.perf.iteration_time import Profile
from shared.text.tokenizer import Tokenizer

Result = TypeVar("Result")

DURATION_S, SEED = 45.0, 3
LOAD = 0.85  # mean rate over the capacity of the replicas; the bursts are 2.6 times the mean
SIMULATED = FleetSpec(profile="a100-llama3-8b", pace=0.2, tiers=TIERS, gateway=False, drain_s=2.0)
QUICK = Rush(fleet=SIMULATED, rate=10.0, duration_s=2.0, seed=SEED, wait_s=20.0)
FCFS_CHUNK_TOKENS = 2048  # the best of a sweep on its load
POLICIES: dict[str, dict[str, str]] = {
    "fcfs": {"chunk_tokens": str(FCFS_CHUNK_TOKENS)},
    "slackline": {},
}
PLAIN_WIDTH = 120  # columns, where the output is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        --quick: send a few requests to simulated engines, without torch, to see that all works
        --seed K = {SEED}: random seed of the requests
        --out DIR = out/demo: folder for reports
        """,
    )


def run(args: argparse.Namespace) -> int:
    quiet_logs()
    console = output(PLAIN_WIDTH)
    make_folder("--out", args.out)
    return uvloop.run(_until_signal(args, console))


async def _until_signal(args: argparse.Namespace, console: Console) -> int:
    """Runs the demonstration to its end or until Ctrl-C. No fleet runs when it returns."""
    work = asyncio.ensure_future(_demo(args, console))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        console.print("\nstopped; nothing is left running")
        return INTERRUPTED
    return 0


async def _demo(args: argparse.Namespace, console: Console) -> None:
    began_s, load, prompts = time.monotonic(), replace(QUICK, seed=args.seed), None
    busy = await asyncio.to_thread(machine.busy)
    if not args.quick:
        console.rule("1 of 2  A model answers")
        answer = partial(questions.answer, console=console)
        profile = await _on(questions.spec(), answer, console)
        load = _scaled_to(profile, load)
        prompts = Prompts(Tokenizer.load(models.folder(models.DEFAULT)), args.seed)
    console.rule("2 of 2  A rush of requests")
    requests = load.requests()
    engines = "one replica" if load.fleet.replicas == 1 else "two replicas"
    share = (
        "on simulated engines"
        if args.quick
        else f"{100 * LOAD:.0f} % of the capacity of {engines} on this machine"
    )
    console.print(
        f"{len(requests)} requests in three tiers arrive within {load.duration_s:g} s, "
        "in bursts with the shape of a recorded trace: "
        f"{load.rate:.1f} a second on average, {share}. "
        "Two policies serve the same requests: first in order of arrival "
        f"(fcfs, with the best chunk of a sweep, {FCFS_CHUNK_TOKENS} tokens), "
        "then as each token is due (slackline)."
    )
    console.print(
        f"Other work used {100 * busy:.0f} % of this machine's cores before: the more it is, "
        "the fewer requests the engines keep up with."
    )
    reports = []
    for policy, settings in POLICIES.items():
        label = " ".join([policy, *(f"chunk {value}" for value in settings.values())])
        console.print(f"\n[bold]{label}[/]")
        report = await _on(
            dataclasses.replace(load.fleet, policy=policy, settings=settings),
            partial(
                rush.serve,
                label=label,
                rush=load,
                requests=requests,
                prompts=prompts,
                command=shlex.join(["slackline", *sys.argv[1:]]),
                console=console,
            ),
            console,
        )
        for note in report.notes:
            console.print(f"  {note}", style="dim")
        write_report(report, args.out / f"{policy}.json")
        reports.append(report)
    console.rule("Results")
    print_table(console, side_by_side(reports))
    console.print(_in_words(*reports))
    console.print(f"\n[dim]{DEFINITION}[/]\n")
    console.print(
        f"reports  {args.out}/fcfs.json, {args.out}/slackline.json  "
        f"(slackline compare {args.out}/*.json)",
        soft_wrap=True,
    )
    console.print(f"[dim]{time.monotonic() - began_s:.0f} s in all[/]")


def _scaled_to(profile: Profile, rush: Rush) -> Rush:
    """The rush for torch engines, at LOAD times their capacity by `profile`."""
    replicas = min(2, torch_replicas())
    fleet = dataclasses.replace(rush.fleet, engine="torch", profile="", pace=1.0, replicas=replicas)
    torch = replace(rush, fleet=fleet, duration_s=DURATION_S, wait_s=90.0)
    return replace(torch, rate=LOAD * replicas * capacity_per_s(profile, torch.requests()))


async def _on(
    spec: FleetSpec, work: Callable[[Fleet], Coroutine[Any, Any, Result]], console: Console
) -> Result:
    """Starts a fleet, does `work` on it and stops it. Raises the error of either."""
    console.print(
        "[dim]starting nats-server, admission, planner, relegation, "
        f"{spec.replicas} x {spec.engine} worker ...[/]"
    )
    async with Fleet(spec, lambda line: console.print(line, markup=False)) as fleet:
        return await fleet.unless_failed(work(fleet))


def _in_words(fcfs: Report, slackline: Report) -> str:
    """The table in words, for a reader who sees such a table for the first time."""
    first = next(iter(fcfs.tiers))
    lost = fcfs.total.offered - fcfs.total.met
    kept = slackline.total.offered - slackline.total.met
    if kept >= lost:
        return (
            "\nThe load was too low to separate the policies, or this machine was too busy with "
            "other work."
        )
    return (
        f"\nThe engines and the {fcfs.total.offered} requests were the same. "
        "In the bursts more requests arrived than the engines could serve at once. "
        f"In order of arrival (fcfs), {first} requests waited behind long prompts that had "
        f"a minute to spare: {percent(fcfs.tiers[first].met_fraction)} of them met their SLO. "
        f"By due times (slackline), {percent(slackline.tiers[first].met_fraction)} did: requests "
        "with time left wait, and chunks grow while no token is urgent and shrink when one is due. "
        "A request that can no longer meet its SLO is relegated early and finished with the "
        "capacity that is left, so that it does not make others late "
        f"({slackline.total.relegated} here). SLOs missed: {lost} with fcfs, {kept} with slackline."
    )
