"""`slackline bench`: figures of the hot path, each beside its aim.

A missed aim is no error: the exit status does not depend on the figures.
"""

import argparse
import shlex
import sys
import time
from datetime import UTC, datetime

import msgspec
import uvloop

from loadgen.bench import idle, loaded, machine, planning, scale
from loadgen.bench import simulator_speed as simulator
from loadgen.bench.figure import BenchReport, Figure, table
from loadgen.bench.live_fleet import observed
from loadgen.cli.options.option import add_options
from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.load.connection import quiet_logs
from loadgen.tables import output, print_json, print_table
from loadgen.writing import json_of, make_folder, write
from shared.errors import ConfigError

PARTS = ("planning", "simulator", "idle", "loaded", "scale")


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """The number of samples, or the length, of each part."""

    steps: int = 5000  # planning steps
    simulated: int = 5000  # requests of each simulation
    requests: int = 200  # through an idle fleet
    settle_s: float = 4.0  # of load before the measurement
    loaded_s: float = 30.0  # of load that is measured


QUICK = Effort(steps=100, simulated=200, requests=8, settle_s=1.0, loaded_s=2.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        --quick: measure every figure with few samples, in seconds
        --only {"|".join(PARTS)}: measure this part alone
        --seed K = 1: random seed of the load
        --out FILE = out/bench.json: write the report to FILE as JSON
        --json: print JSON instead of a table
        """,
    )


def run(args: argparse.Namespace) -> int:
    quiet_logs()
    make_folder("--out", args.out.parent)
    if args.out.is_dir():
        raise ConfigError(f"--out {args.out}: it is a folder, not a file")
    began, began_at_s = datetime.now(UTC), time.monotonic()
    effort = QUICK if args.quick else Effort()
    parts = PARTS if args.only is None else (args.only,)
    facts = machine.describe()
    figures: list[Figure] = []
    if "planning" in parts:
        _say("planning steps of one replica, without a bus")
        figures += planning.measure(effort.steps, args.seed)
    if "simulator" in parts:
        _say("simulations")
        figures += simulator.measure(effort.simulated, args.seed)
    if "idle" in parts or "loaded" in parts:
        figures += uvloop.run(_with_fleet(parts, effort, args.seed))
    if "scale" in parts:
        _say("services as replicas grow, each on a NATS server of its own")
        figures += uvloop.run(
            scale.measure(scale.QUICK if args.quick else scale.WHOLE, args.seed, _say)
        )
    report = BenchReport(
        command=shlex.join(["slackline", *sys.argv[1:]]),
        seed=args.seed,
        quick=args.quick,
        began=began.isoformat(timespec="seconds"),
        took_s=time.monotonic() - began_at_s,
        machine=facts,
        figures=figures,
    )
    write(args.out, json_of(report))
    if args.json:
        print_json(report)
    else:
        print_table(output(180), table(report))
        print(f"The report is in {args.out}.")
    return 0


async def _with_fleet(parts: tuple[str, ...], effort: Effort, seed: int) -> list[Figure]:
    _say("starting a fleet of two simulated engines")
    spec = FleetSpec(profile=loaded.PROFILE, pace=loaded.pace(), drain_s=1.0)
    figures: list[Figure] = []
    async with Fleet(spec, _say) as fleet, observed(fleet, seed) as (caller, observer):
        at_rest = loaded.memory_figures("memory at rest", loaded.memory_now(fleet))
        if "idle" in parts:
            _say("requests through an idle fleet, one at a time")
            figures += await idle.measure(caller, observer, effort.requests, _say)
        if "loaded" in parts:
            _say("a steady load on both replicas")
            figures += at_rest + await loaded.measure(
                fleet, caller, observer, effort.settle_s, effort.loaded_s, _say
            )
        _say("stopping the fleet")
    return figures


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
