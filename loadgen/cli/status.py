"""`slackline status`: whether a fleet works, in one look."""

import argparse
import asyncio

from rich.console import Console

from loadgen.access import access_of, add_access_arguments
from loadgen.cli.options.option import add_options
from loadgen.fleet.fleet_tables import headline, replica_table, tier_table
from loadgen.load.connection import connecting
from loadgen.tables import output, print_json, print_line, print_table
from shared.bus.users import OPERATOR
from shared.client.ping import answers
from shared.clock import Clock
from shared.console.listening import listening
from shared.console.picture import Picture
from shared.errors import ConfigError

# the name under which each answers a ping
SERVICES = {"admission": "requests", "planner": "planner", "relegation": "relegation"}
LISTEN_S = 1.5  # in which every replica is heard many times, and every worker once
ANSWER_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        --listen S = {LISTEN_S}: listen for S seconds; longer shows more of the SLOs
        --json: print JSON instead of tables
        """,
    )
    add_access_arguments(parser, "the operator")


def run(args: argparse.Namespace) -> int:
    """Prints the status. Returns 0 while the fleet takes requests, else 1."""
    if not 0 < args.listen <= 3600:
        raise ConfigError("--listen must be above 0, and at most an hour")
    picture, silent = asyncio.run(_look(args))
    working = not silent and any(replica.accepting for replica in picture.replicas)
    if args.json:
        print_json({"working": working, "silent": silent, "fleet": picture})
        return 0 if working else 1
    out = output(120)
    _print_tables(out, picture)
    if not picture.replicas:
        out.print("no replica is heard: no worker runs, or no planner plans for it", style="bold")
    for name in silent:
        out.print(f"{name} does not answer", style="bold red")
    out.print("the fleet takes requests" if working else "the fleet takes no requests")
    return 0 if working else 1


def _print_tables(out: Console, picture: Picture) -> None:
    if picture.replicas:
        print_line(out, headline(picture))
        print_table(out, replica_table(picture))
    if any(tier.offered for tier in picture.tiers):
        print_table(out, tier_table(picture))


async def _look(args: argparse.Namespace) -> tuple[Picture, list[str]]:
    """The picture, and the services that do not answer. Raises BusError without a NATS server."""
    clock = Clock()
    async with (
        connecting(access_of(args), "slackline-status", OPERATOR) as bus,
        listening(bus, clock, None) as collector,
    ):
        *answered, _ = await asyncio.gather(
            *(answers(bus, service, ANSWER_S) for service in SERVICES.values()),
            asyncio.sleep(args.listen),
        )
        silent = [name for name, answer in zip(SERVICES, answered, strict=True) if not answer]
        return collector.picture(clock.unix_s()), silent
