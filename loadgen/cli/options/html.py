"""The option --html: the report of a command as one HTML page."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from loadgen.cli.options.option import add_options
from loadgen.load.report import Report
from loadgen.trials.comparison import Round
from loadgen.trials.figures_table import circumstances
from shared.errors import ConfigError
from shared.rules.tiers import Tier, TierSet


def add_html_argument(parser: argparse.ArgumentParser) -> None:
    text = "write a report with plots to FILE, as one HTML page that loads nothing"
    add_options(parser, f"--html FILE: {text}")


def check_html(path: Path | None) -> None:
    """Raises ConfigError where the report cannot be written, before the runs begin."""
    if path is not None and (not path.absolute().parent.is_dir() or path.is_dir()):
        raise ConfigError(f"--html: {path} cannot be written: is its folder there?")


def write_reports(reports: Sequence[Report], table: Table, path: Path) -> None:
    """The page of one run of `slackline load`, or of several. Raises ConfigError."""
    from loadgen.trials.course_plots import Run
    from loadgen.trials.html_report import write_html

    first = reports[0]
    tiers = TierSet(
        name=first.tier_set,
        default=next(iter(first.tiers)),
        tiers={name: Tier(slo=of.slo) for name, of in first.tiers.items() if of.slo is not None},
    )
    runs = [
        Run(
            report.label or f"load {number}",
            round(report.rate_per_s, 2),
            {n: of.met_fraction for n, of in report.tiers.items() if of.met_fraction is not None},
            report.course,
        )
        for number, report in enumerate(reports, start=1)
    ]
    commands = dict.fromkeys(report.command for report in reports)
    write_html(
        path,
        title=f"Slackline: {', '.join(dict.fromkeys(run.label for run in runs))}",
        facts=[
            f"{report.planned} requests over {report.transport}, {report.rate_per_s:.2f} a second "
            f"for {report.offered_s:.0f} s; tiers {report.tier_set}, seed {report.seed}"
            for report in reports
        ],
        tables=[table],
        runs=runs,
        tiers=tiers,
        foot=[first.definition, *commands],
    )


def write_rounds(
    rounds: Sequence[Round], tiers: TierSet, table: Table, command: str, path: Path
) -> None:
    """The page of simulated runs. Raises ConfigError."""
    from loadgen.trials.course_plots import runs_of
    from loadgen.trials.html_report import write_html

    first = rounds[0].comparison
    runs = [run for one in rounds for run in runs_of(one)]
    rate = None if len(rounds) > 1 else first.rate_rps
    write_html(
        path,
        title="Slackline: policies on identical arrivals",
        facts=[circumstances(first.policies[0], rate)],
        tables=[table],
        runs=runs,
        tiers=tiers,
        foot=[command],
    )
