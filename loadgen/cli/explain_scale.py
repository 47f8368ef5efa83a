"""`slackline explain --scale`: says how many replicas each model needs, for which tier, and why."""

import argparse
import asyncio
import textwrap

from rich.console import Console
from rich.markup import escape

from loadgen.access import access_of
from loadgen.load.connection import connecting
from loadgen.tables import print_json
from shared import subjects
from shared.bus.users import OPERATOR
from shared.errors import SlacklineError
from shared.schemas import ReplicasNeeded

LISTEN_S = 2.5  # the instance that leads tells of each model once a second


def run(args: argparse.Namespace) -> int:
    """Prints the newest needs. Raises SlacklineError if nobody tells any."""
    needed = asyncio.run(_heard(args))
    if not needed:
        raise SlacklineError("no relegation tells what is needed: does one run?")
    if args.json:
        print_json({"needed": needed})
    else:
        for each in needed:
            _show(each, Console(soft_wrap=False))
    return 0


async def _heard(args: argparse.Namespace) -> list[ReplicasNeeded]:
    found: dict[str, ReplicasNeeded] = {}
    async with connecting(access_of(args), "slackline-explain", OPERATOR) as bus:

        def hear(needed: ReplicasNeeded, _: object) -> None:
            found[needed.model] = needed

        await bus.subscribe(subjects.SCALING, ReplicasNeeded, hear)
        await asyncio.sleep(LISTEN_S)
    return [found[model] for model in sorted(found)]


def _show(needed: ReplicasNeeded, console: Console) -> None:
    several = "" if needed.replicas == 1 else "s"
    line = f"{needed.model}: {needed.replicas} replica{several} needed, {needed.serving} serve"
    console.print(escape(line))
    width = min(console.width, 100)
    console.print(escape(textwrap.fill(needed.why, width, break_on_hyphens=False)))
    rows = ", ".join(f"{need.tier} {need.replicas}" for need in needed.tiers)
    if rows:
        console.print(escape(f"asked for by each tier beside those due sooner: {rows}"))
    if needed.prefill:
        console.print(escape(f"prompts only: {', '.join(needed.prefill)}"))
