"""The `slackline` command line. Each subcommand is a module with `add_arguments(parser)` and
`run(args) -> int`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from shared.errors import ConfigError, SlacklineError

# Name: (module, one line of help). Imported only when chosen, so that `slackline --help` is quick.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "loadgen.commands.demo",
        "a real model answers, then two policies side by side under the same bursts, in three minutes",
    ),
    "up": ("loadgen.commands.up", "start a fleet on this machine, and stop it with Ctrl-C"),
    "submit": ("loadgen.commands.submit", "send one prompt and stream the answer"),
    "chat": (
        "loadgen.commands.chat",
        "talk with the model of a running fleet, and see how quick each answer was",
    ),
    "load": (
        "loadgen.commands.load",
        "replay a trace or a synthetic workload against a running fleet",
    ),
    "simulate": (
        "loadgen.commands.simulate",
        "serve a trace or a workload in virtual time, with the cores that run live",
    ),
    "capacity": (
        "loadgen.commands.capacity",
        "find the highest rate at which few enough requests miss their SLO, in virtual time",
    ),
    "search": (
        "loadgen.commands.search",
        "rank the settings of a policy, such as the mix of its pools, by how they serve a load in virtual time",
    ),
    "compare": (
        "loadgen.commands.compare",
        "put policies on identical arrivals, in virtual time, side by side; or reports of load runs",
    ),
    "bound": (
        "loadgen.commands.bound",
        "limit what any scheduler could satisfy of a trace or a workload, whatever it knows",
    ),
    "profile": (
        "loadgen.commands.profile",
        "list, show and fit the profiles that say how long an iteration takes",
    ),
    "bench": (
        "loadgen.commands.bench",
        "measure the hot path on this machine, each figure beside its aim",
    ),
}
DEFAULT_URL = "nats://127.0.0.1:4222"
INTERRUPTED, BROKEN_PIPE = 130, 141  # as shells say it


class Parser(argparse.ArgumentParser):
    """Errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help says more)\n")


def default_url() -> str:
    return os.environ.get("SLACKLINE_URL", DEFAULT_URL)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 well, 1 the system failed, 2 the arguments are wrong, 130 interrupted, 141
    the reader left.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="slackline",
        description="Multi-SLO LLM serving: every request carries the latency it needs.",
    )
    choices = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    for name, (module, line) in COMMANDS.items():
        sub = choices.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.")
        if words[:1] == [name]:
            import_module(module).add_arguments(sub)
    args = parser.parse_args(words)
    try:
        code: int = import_module(COMMANDS[args.command][0]).run(args)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"slackline {args.command}: {error}", file=sys.stderr)
        return 2
    except SlacklineError as error:
        print(f"slackline {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read has seen enough, as `| head` does
        # for what is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code
