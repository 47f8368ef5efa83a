"""The way of a client to a NATS server, and the options that say it."""

import argparse
import os
from dataclasses import dataclass

DEFAULT_URL = "nats://127.0.0.1:4222"


@dataclass(frozen=True, slots=True)
class Access:
    """The way to a NATS server: its URL, the file of a user's seed, that of the authority to trust;
    the files may be empty.
    """

    url: str
    creds: str = ""
    tls_ca: str = ""


def add_access_arguments(parser: argparse.ArgumentParser, user: str) -> None:
    """The options of a command that connects to NATS as `user`."""
    parser.add_argument(
        "--url",
        default=os.environ.get("SLACKLINE_URL", DEFAULT_URL),
        help=f"URL of the NATS server (default: SLACKLINE_URL, else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--creds",
        default=os.environ.get("SLACKLINE_CREDS", ""),
        metavar="FILE",
        help=f"key of {user} at the NATS server (default: SLACKLINE_CREDS, else none)",
    )
    parser.add_argument(
        "--tls-ca",
        default=os.environ.get("SLACKLINE_TLS_CA", ""),
        metavar="FILE",
        help="authority to trust at the NATS server (default: SLACKLINE_TLS_CA, else the system's)",
    )


def access_of(args: argparse.Namespace) -> Access:
    return Access(args.url, args.creds, args.tls_ca)
