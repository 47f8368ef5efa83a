"""The `slackline` command line. A subcommand is a module with `add_arguments` and `run`."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from shared.errors import ConfigError, SlacklineError

# Each command's module below loadgen.cli, whose last part is its name, and its line of help.
LINES = """
demo: show a real model answer, then two policies side by side under the same bursts, in three
    minutes
up: start a fleet on this machine, and stop it with Ctrl-C
keys: make the keys, permissions and certificates of a fleet's NATS server
streams: make the streams and buckets at a NATS server, before its services start
config: check a configuration file, line by line, and say what each setting means
sending.submit: send one prompt and stream the answer
sending.chat: talk with the model of a running fleet, and see the latency of each answer
status: say whether a fleet works, and what it does just now
top: watch a fleet at work in the terminal
explain: say why a request was late, with the share of each cause
usage: say how many requests and tokens each tenant used in a month
sending.load: send the requests of a trace or a synthetic workload to a running fleet
record: write the requests of a running fleet to a trace, which `slackline advise` reads
simulated.simulate: serve a trace or a workload in virtual time, with the cores of the live services
simulated.capacity: find the highest rate at which few enough requests miss their SLO, in virtual
    time
simulated.advise: say how many replicas of which GPU a recorded load needs, and which requests
    suffer
simulated.search: rank the settings of a policy, such as the mix of its pools, by their results on a
    load, in virtual time
simulated.compare: put policies side by side on identical arrivals, in virtual time, or reports of
    load runs
simulated.bound: bound the requests of a trace or a workload that any scheduler could satisfy, even
    one that knows the future
simulated.profile: list, show and fit profiles, the models of iteration time
key: make a key with which a tenant's clients reach the gateway, and store its hash
bench: measure the hot path on this machine, each figure beside its aim
completion: print the script with which bash, zsh or fish completes commands and options
"""
# By name: (module, line of help). Imported only when chosen, so that `slackline --help` is quick.
COMMANDS = {
    module.rpartition(".")[2]: (f"loadgen.cli.{module}", " ".join(line.split()))
    for module, line in re.findall(r"^(\S+): (.+(?:\n +.+)*)", LINES, re.MULTILINE)
}
INTERRUPTED, BROKEN_PIPE = 130, 141  # the exit statuses of shells


class Parser(argparse.ArgumentParser):
    """Errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help says more)\n")


def _interrupt(*_: object) -> None:
    """SIGTERM ends a command as Ctrl-C does, so that the files it writes are whole."""
    signal.raise_signal(signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0: success; 1: the system failed; 2: wrong arguments; 130: interrupted; 141: the reader of the
    output left.
    """
    if argv is None:
        signal.signal(signal.SIGTERM, _interrupt)
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="slackline",
        description="Multi-SLO LLM serving: every request carries the latency it needs.",
    )
    parser.add_argument("--version", action="version", version=f"slackline {version('slackline')}")
    choices = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    command, chosen = words[0] if words else "", parser
    try:
        for name, (module, line) in COMMANDS.items():
            sub = choices.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.")
            if name == command:
                chosen = sub
                import_module(module).add_arguments(sub)
        args, unknown = parser.parse_known_args(words)
        if unknown:
            chosen.error(f"unrecognized arguments: {' '.join(unknown)}")
        code: int = import_module(COMMANDS[args.command][0]).run(args)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"slackline {command}: {error}", file=sys.stderr)
        return 2
    except SlacklineError as error:
        print(f"slackline {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends without a traceback
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output left, as `| head` does
        # the output that is flushed at exit must go somewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code
