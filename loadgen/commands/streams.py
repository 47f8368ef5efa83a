"""`slackline streams`: makes the streams and buckets at a NATS server, as its operator."""

import argparse
import asyncio

from loadgen.cli import default_url
from loadgen.load.connection import CONNECT_S, quiet_logs
from shared.bus.nats import connect
from shared.bus.users import OPERATOR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        required=True,
        metavar="R1,R2,...",
        help="the replicas of the workers; each has a log of its own",
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=1,
        metavar="N",
        help="servers of the NATS cluster that keep each stream (default: 1)",
    )
    parser.add_argument(
        "--url",
        default=default_url(),
        help="URL of the NATS server (default: SLACKLINE_URL, else nats://127.0.0.1:4222)",
    )


def run(args: argparse.Namespace) -> int:
    quiet_logs()
    asyncio.run(_make(args.url, args.workers.split(","), args.copies))
    return 0


async def _make(url: str, replicas: list[str], copies: int) -> None:
    async with connect(url, "slackline-streams", OPERATOR, connect_s=CONNECT_S) as bus:
        await bus.make_streams(replicas, copies)
    print(f"the buckets, and the logs of {', '.join(replicas)}, are there")
