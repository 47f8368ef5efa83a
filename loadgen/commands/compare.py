"""`slackline compare`: reports of `slackline load --out`, side by side."""

import argparse
from pathlib import Path

from rich.console import Console

from loadgen.report import DEFINITION, read_report, side_by_side, unlike


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="JSON files written by `slackline load --out`")


def run(args: argparse.Namespace) -> int:
    console = Console()
    reports = [read_report(path) for path in args.reports]
    console.print(side_by_side(reports))
    if different := unlike(reports):
        console.print(f"These runs have different {different}: their figures say little about what served them.", style="bold")
    console.print(DEFINITION, style="dim")
    return 0
