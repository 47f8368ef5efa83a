"""The figures of `slackline bench`, each beside its aim, and their report as JSON and table."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from rich.table import Table

from loadgen.bench.machine import Machine
from loadgen.tables import with_columns

# The factor of a unit for a value in base units; other units show the value as it is.
UNITS = {"ms": 1e3, "us": 1e6, "MB": 1e-6, "%": 100.0}


class Figure(Struct, frozen=True):
    """One figure. `value` is in base units: seconds, bytes, a fraction, a count.

    None: nothing was measured. `unit` is the unit in which the table shows the value.
    """

    part: str
    name: str
    value: float | None
    unit: str
    aim: float | None = None  # the value should be at most this
    least: float | None = None  # the value should be at least this
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None or (self.aim is None and self.least is None):
            return None
        return (self.aim is None or self.value <= self.aim) and (
            self.least is None or self.value >= self.least
        )

    def shown(self, value: float | None) -> str:
        if value is None:
            return "-"
        scaled = value * UNITS.get(self.unit, 1.0)
        return f"{scaled:{',.0f' if scaled >= 1000 else '.3g'}} {self.unit}".strip()

    @property
    def aimed(self) -> str:
        if self.least is not None:
            return f">= {self.shown(self.least)}"
        return "" if self.aim is None else f"<= {self.shown(self.aim)}"


class BenchReport(Struct, frozen=True, kw_only=True):
    command: str
    seed: int
    quick: bool
    began: str  # UTC
    took_s: float
    machine: Machine
    figures: Sequence[Figure]


def quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


def spread(
    part: str,
    name: str,
    seconds: Sequence[float],
    *,
    p50: float | None = None,
    p99: float | None = None,
) -> list[Figure]:
    """The median and the 99th percentile of measured seconds, with the aims given for them."""
    note = f"{len(seconds)} samples"
    return [
        Figure(part, f"{name}, p50", quantile(seconds, 0.5), "ms", aim=p50, note=note),
        Figure(part, f"{name}, p99", quantile(seconds, 0.99), "ms", aim=p99),
    ]


def table(report: BenchReport) -> Table:
    title = f"{report.machine}; seed {report.seed}; {report.took_s:.0f} s"
    out = with_columns(Table(title=title, title_justify="left"), "|figure|>measured|>aim||")
    part = ""
    for figure in report.figures:
        if part and figure.part != part:
            out.add_section()
        verdict = {None: "", True: "met", False: "missed"}[figure.met]
        head = "" if figure.part == part else figure.part
        measured = figure.shown(figure.value)
        out.add_row(head, figure.name, measured, figure.aimed, verdict, figure.note)
        part = figure.part
    return out
