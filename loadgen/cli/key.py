"""`slackline key`: makes a tenant's HTTP key. The key is printed once; a file keeps its hash."""

import argparse
import sys
from pathlib import Path

from shared.errors import ConfigError, PeerError
from shared.rules import http_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="whose requests the key makes")
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="the file of keys (SLACKLINE_GATEWAY_KEYS of the gateway), to which a line is added; "
        "without it, the lines of a configuration file go to standard error",
    )


def run(args: argparse.Namespace) -> int:
    key = http_keys.new_key()
    try:
        line = http_keys.line_of(args.tenant, key)
    except PeerError as error:
        raise ConfigError(error.message) from error
    if args.file is None:
        print(key)
        print(
            f'[tenants.{args.tenant}]\nkeys = ["{line.split()[1]}"]\n'
            "# for the configuration file; keys that are there already stay in the list",
            file=sys.stderr,
        )
        return 0
    try:
        text = args.file.read_text(encoding="utf-8") if args.file.exists() else ""
        with args.file.open("a", encoding="utf-8") as file:
            file.write(line if text.endswith("\n") or not text else f"\n{line}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{args.file} cannot be written: {error}") from error
    print(key)
    print(
        f"{args.file} has its hash; the key is shown this once. A gateway that runs reads the file "
        "within seconds.",
        file=sys.stderr,
    )
    return 0
