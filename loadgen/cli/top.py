"""`slackline top`: shows a fleet at work, in a terminal, until Ctrl-C or q."""

import argparse
import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from loadgen.access import access_of, add_access_arguments
from loadgen.cli.options.option import add_options
from loadgen.fleet.fleet_tables import headline, request_table, strip_table, tier_table
from loadgen.load.connection import connecting
from loadgen.tables import fitted
from shared.bus.users import OPERATOR
from shared.clock import Clock
from shared.console.listening import listening
from shared.console.picture import Picture
from shared.errors import ConfigError

QUIT = b"q\x03"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--every S = 0.5: look every S seconds")
    add_access_arguments(parser, "the operator")


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.every <= 60:
        raise ConfigError("--every must be 0.1 to 60 seconds")
    console = Console()
    if not console.is_terminal or not sys.stdin.isatty():
        raise ConfigError("it needs a terminal; `slackline status` says the same once")
    with _keys() as keys:
        asyncio.run(_show(args, console, keys))
    return 0


async def _show(args: argparse.Namespace, console: Console, keys: int) -> None:
    """Show until q or Ctrl-C. Raises BusError without a NATS server."""
    loop, stop, clock = asyncio.get_running_loop(), asyncio.Event(), Clock()

    def on_key() -> None:
        if set(QUIT) & set(os.read(keys, 64)):
            stop.set()

    async with (
        connecting(access_of(args), "slackline-top", OPERATOR) as bus,
        listening(bus, clock, None) as collector,
    ):
        loop.add_reader(keys, on_key)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not stop.is_set() and not bus.failed.done():
                live.update(screen(collector.picture(clock.unix_s()), console), refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(args.every):
                        await stop.wait()
        loop.remove_reader(keys)


def screen(picture: Picture, console: Console) -> Group:
    """The fleet, its tiers and replicas, and the most pressing requests on the lines left."""
    width, height = console.size
    heard_s = picture.at_unix_s - picture.since_unix_s
    span = f"the last {min(heard_s, picture.window_s):.0f} s"
    parts: list[RenderableType] = [
        Text(headline(picture), style="bold", overflow="ellipsis", no_wrap=True),
        fitted(tier_table(picture), width),
        fitted(strip_table(picture), width),
    ]
    foot = Text(f"{picture.held} requests held; SLOs over {span}; q quits", style="dim")
    used = sum(len(console.render_lines(part)) for part in parts)
    room = height - used - 5  # the head and foot of the table, and the last line
    if room > 0:
        parts.append(fitted(request_table(picture.requests[:room]), width))
    return Group(*parts, foot)


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """The terminal as a file descriptor, with each key readable at once; restored at the end."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
