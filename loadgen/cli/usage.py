"""`slackline usage`: the requests and tokens of each tenant in a month."""

import argparse
import asyncio
import datetime as dt
import re

from rich.box import SIMPLE_HEAD
from rich.table import Table

from loadgen.access import access_of, add_access_arguments
from loadgen.cli.options.option import add_options
from loadgen.load.connection import connecting
from loadgen.tables import output, print_json, print_table, with_columns
from shared.bus.users import OPERATOR
from shared.errors import ConfigError
from shared.store.usage import DaySum, month_sums

MONTH = re.compile(r"\d{4}-(0[1-9]|1[0-2])")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        --month YYYY-MM: the month, by UTC (default: this one); a day stays for 400 days
        --json: print one JSON object
        """,
    )
    add_access_arguments(parser, "the operator")


def run(args: argparse.Namespace) -> int:
    month = args.month or f"{dt.datetime.now(dt.UTC):%Y-%m}"
    if not MONTH.fullmatch(month):
        raise ConfigError(f"--month {month}: write it as 2001-01")
    sums = asyncio.run(_read(args, month))
    if args.json:
        print_json({name: _figures(used) for name, used in sums.items()})
        return 0
    out = output()
    if not sums:
        out.print(f"no request ended in {month}")
        return 0
    rows = sorted(sums.items(), key=lambda item: -item[1].output_tokens)
    total = DaySum()
    table = with_columns(
        Table(box=SIMPLE_HEAD, padding=(0, 1)), f"{month}|>requests|>tokens in|>tokens out"
    )
    for name, used in rows:
        total = total.plus(used)
        table.add_row(name, *_cells(used))
    table.add_section()
    table.add_row("all", *_cells(total))
    print_table(out, table)
    return 0


async def _read(args: argparse.Namespace, month: str) -> dict[str, DaySum]:
    async with connecting(access_of(args), "slackline-usage", OPERATOR) as bus:
        return await month_sums(bus.usage, month)


def _figures(used: DaySum) -> dict[str, int]:
    return {
        "requests": used.requests,
        "prompt_tokens": used.prompt_tokens,
        "output_tokens": used.output_tokens,
    }


def _cells(used: DaySum) -> list[str]:
    return [f"{figure:,}" for figure in _figures(used).values()]
