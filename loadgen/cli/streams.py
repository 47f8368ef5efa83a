"""`slackline streams`: makes the streams and buckets at a NATS server, as its operator."""

import argparse
import asyncio

from loadgen.access import Access, access_of, add_access_arguments
from loadgen.cli.options.option import add_options
from loadgen.load.connection import connecting
from shared.bus.users import OPERATOR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        --workers R1,R2,... (required): the replicas of the workers; each has a log of its own
        --copies N (int): servers of the NATS cluster that keep each stream; one, or as many as now
        """,
    )
    add_access_arguments(parser, "the operator")


def run(args: argparse.Namespace) -> int:
    asyncio.run(_make(access_of(args), args.workers.split(","), args.copies))
    return 0


async def _make(access: Access, replicas: list[str], copies: int | None) -> None:
    async with connecting(access, "slackline-streams", OPERATOR) as bus:
        for told in await bus.make_streams(replicas, copies):
            print(told)
    print(f"the buckets, and the logs of {', '.join(replicas)}, are there")
