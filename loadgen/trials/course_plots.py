"""Plots the courses of runs (attainment over rate, latencies beside the SLO, a burst) and writes
the files of all plots of a comparison.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from loadgen.load.run_course import MEASURES, QUANTILES, Course
from loadgen.trials.comparison import Round
from loadgen.trials.figures_table import circumstances, named
from loadgen.trials.plots import (
    bound_line,
    latency_over_load,
    line_of,
    new_figure,
    plain,
    plane,
    violations,
    violations_over_load,
    write,
)
from shared.rules.tiers import TierSet
from shared.vocabulary import Slo

MET, MISSED = "#009e73", "#d55e00"
AROUND = 15  # parts of a run on either side of its busiest one
GROUPS = 8  # of moments, by their rate
LEAST = 5  # requests of a group, for a percentage of them to say something
SMOOTHED = 5  # parts over which the rate of a moment is counted


class Run(NamedTuple):
    """One run. `met`: by tier, the fraction of the offered requests that met their SLO."""

    label: str
    rate_rps: float
    met: dict[str, float]
    course: Course | None


def runs_of(one: Round) -> list[Run]:
    """A run of each policy."""
    return [
        Run(
            named(found.policy, found.settings),
            one.comparison.rate_rps,
            {tier: 1 - group.violated_fraction for tier, group in found.by_tier.items()},
            course,
        )
        for found, course in zip(one.comparison.policies, one.courses, strict=True)
    ]


def write_plots(rounds: Sequence[Round], tiers: TierSet, folder: Path) -> Iterator[Path]:
    """Write the plots (SVG), and yield each file. Raises ConfigError if one cannot be written."""
    comparisons = [one.comparison for one in rounds]
    for one in rounds:
        found, runs = one.comparison, runs_of(one)
        suffix = f"-at-{found.rate_rps:g}" if len(rounds) > 1 else ""
        yield write(violations(found, tiers), folder / f"violations{suffix}.svg")
        shown = [name for name in tiers.tiers if any(name in run.met for run in runs)]
        below = circumstances(found.policies[0], found.rate_rps)
        yield write(latencies(runs, tiers, shown, below), folder / f"latency{suffix}.svg")
        if any(len(points) for each in one.planes for points in each.values()):
            yield write(plane(one, tiers), folder / f"plane{suffix}.svg")
    if len(rounds) > 1:
        yield write(violations_over_load(comparisons, tiers), folder / "violations-over-load.svg")
        yield write(latency_over_load(comparisons, tiers), folder / "latency-over-load.svg")


def attainment_over_rate(runs: Sequence[Run], tiers: Sequence[str]) -> Figure:
    """Runs at several rates: a line for each label. Runs at one rate: the parts of each run, by the
    rate at which requests came in them.
    """
    several = len({run.rate_rps for run in runs}) > 1
    title = "SLOs met, over the offered rate" + ("" if several else " of the moments of the run")
    figure, every = new_figure(
        -(-len(tiers) // 4), min(len(tiers), 4), title, "", sharex=True, sharey=True
    )
    labels = list(dict.fromkeys(run.label for run in runs))
    for axes, tier in zip(every, tiers, strict=False):
        for n, label in enumerate(labels):
            mine = sorted((r for r in runs if r.label == label), key=lambda r: r.rate_rps)
            if several:
                found = [(r.rate_rps, 100 * r.met[tier]) for r in mine if tier in r.met]
                axes.plot(*zip(*found, strict=True), marker="o", markersize=3, **line_of(n))
            else:
                _by_moment(axes, mine[0].course, tier, n)
        axes.set_title(tier)
        axes.set_ylim(-2, 103)
        axes.yaxis.set_major_formatter("{x:.0f} %")
        axes.set_xlabel("requests/s" + ("" if several else ", all tiers"))
    for axes in every[len(tiers) :]:
        axes.remove()
    _legend(figure, labels)
    return figure


def latencies(
    runs: Sequence[Run], tiers: TierSet, shown: Sequence[str], subtitle: str = ""
) -> Figure:
    """A row for each measure, a column for each tier; the SLO is a vertical line."""
    title = "Latencies, cumulative, beside the SLO"
    figure, every = new_figure(len(MEASURES), len(shown), title, subtitle, sharey=True)
    for row, measure in enumerate(MEASURES):
        for place, tier in enumerate(shown):
            axes = every[row * len(shown) + place]
            for n, run in enumerate(runs):
                values_s = run.course.quantiles_s.get(tier, {}).get(measure) if run.course else None
                if values_s:
                    axes.plot(np.maximum(values_s, 1e-3), 100 * QUANTILES, **line_of(n))
            axes.set_xscale("log")
            if axes.lines:
                bound_line(axes, _bound_s(tiers.tiers[tier].slo, measure))
                plain(axes.xaxis)
            axes.set_title(f"{tier}: {measure}")
            axes.set_ylim(0, 101)
            axes.yaxis.set_major_formatter("{x:.0f} %")
            if row == len(MEASURES) - 1:
                axes.set_xlabel("s, log scale")
    _legend(figure, [run.label for run in runs])
    return figure


def burst(runs: Sequence[Run]) -> Figure:
    """The busiest moment of the load and what came before and after: for each run, the requests of
    each part by whether their SLO was met.
    """
    courses = [run.course for run in runs if run.course is not None]
    figure, panels = new_figure(
        len(courses),
        1,
        "The busiest moment: requests by when they came, and whether their SLO was met",
        "",
        width=9.0,
        sharex=True,
        sharey=True,
    )
    labels = [run.label for run in runs if run.course is not None]
    for axes, label, course in zip(panels, labels, courses, strict=True):
        offered, met = _sum(course.offered), _sum(course.met)
        peak = int(np.argmax(offered))
        begin, end = max(0, peak - AROUND), min(len(offered), peak + AROUND + 1)
        at_s = course.part_s * np.arange(begin, end)
        rate, kept = offered[begin:end] / course.part_s, met[begin:end] / course.part_s
        wide = 0.92 * course.part_s
        axes.bar(at_s, kept, wide, align="edge", color=MET, label="met")
        axes.bar(at_s, rate - kept, wide, bottom=kept, align="edge", color=MISSED, label="missed")
        share = 100 * met[begin:end].sum() / max(1, offered[begin:end].sum())
        axes.set_title(f"{label}: {share:.1f} % met")
        axes.set_ylabel("requests/s")
    panels[-1].set_xlabel("s from the beginning of the load")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    return figure


def _by_moment(axes: Axes, course: Course | None, tier: str, n: int) -> None:
    """Draw a tier's attainment by the rate of the moment, in groups of about equal size."""
    if course is None or not sum(course.offered.get(tier, ())):
        return
    offered, met = np.array(course.offered[tier]), np.array(course.met[tier])
    every, around = _sum(course.offered), np.ones(SMOOTHED)
    parts = np.convolve(np.ones(len(every)), around, "same")
    rate = np.convolve(every, around, "same") / (parts * course.part_s)
    order = np.argsort(rate, kind="stable")
    order = order[offered[order] > 0]
    groups = int(np.clip(offered.sum() // LEAST, 1, GROUPS))
    group = np.minimum(groups * (np.cumsum(offered[order]) - 1) // offered.sum(), groups - 1)
    places = [order[group == one] for one in range(groups) if (group == one).any()]
    axes.plot(
        [np.average(rate[place], weights=offered[place]) for place in places],
        [100 * met[place].sum() / offered[place].sum() for place in places],
        marker="o",
        markersize=3,
        **line_of(n),
    )


def _sum(by_tier: dict[str, list[int]]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.sum([np.array(counts) for counts in by_tier.values()], axis=0)
    return found


def _bound_s(slo: Slo, measure: str) -> float | None:
    return {"TTFT": slo.ttft_s, "TBT": slo.tbt_s, "TTLT": slo.ttlt_s}[measure]


def _legend(figure: Figure, labels: Sequence[str]) -> None:
    if len(labels) > 1:
        handles = [Line2D([], [], **line_of(n)) for n in range(len(labels))]
        figure.legend(handles, labels, frameon=False, loc="outside right upper")
