"""Plots the answer of `slackline advise` as SVG: the SLOs met over the number of GPUs, and the load
and the violated requests over time.
"""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from loadgen.advise.advice import Advice, Shown, said, title
from loadgen.advise.late_minutes import MINUTE_S
from loadgen.trials.plots import BOUND_COLOUR, COLOURS, line_of, new_figure, write


def write_plots(advice: Advice, folder: Path) -> Iterator[Path]:
    """Write the plots, and yield each file. Raises ConfigError if one cannot be written."""
    yield write(attainment_over_gpus(advice), folder / "attainment-over-gpus.svg")
    if advice.shown is not None:
        yield write(over_time(advice, advice.shown), folder / "violations-over-time.svg")


def attainment_over_gpus(advice: Advice) -> Figure:
    searched = advice.searched
    below = (
        f"{advice.trace}, the busiest {searched.requests} requests ({searched.seconds:.0f} s), "
        f"tiers {advice.tiers}, seed {advice.seed}"
    )
    figure, [axes] = new_figure(1, 1, "Requests whose SLO is met, over GPUs", below, width=7.0)
    for n, fleet in enumerate(advice.fleets):
        gpus = [count.replicas * fleet.gpus_each for count in fleet.counts]
        met = [100 * count.attainment for count in fleet.counts]
        label = f"{title(fleet)}: {said(fleet)}"
        axes.plot(gpus, met, marker="o", markersize=4, label=label, **line_of(n))
    axes.axhline(100 * advice.target, color=BOUND_COLOUR, linestyle="--", linewidth=1)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("SLO met, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    return figure


def over_time(advice: Advice, shown: Shown) -> Figure:
    assert advice.chosen is not None
    below = f"{advice.trace}, {said(advice.chosen)} of {title(advice.chosen)}"
    figure, [load, lost] = new_figure(
        2, 1, "Load and violated requests, over time", below, width=7.0, sharex=True
    )
    minutes = shown.minutes
    at = [shown.stretch.from_s / MINUTE_S + n for n in range(len(minutes.offered))]
    load.bar(at, [n / MINUTE_S for n in minutes.offered], width=1.0, align="edge", color=COLOURS[0])
    load.set_ylabel("requests/s")
    lost.bar(at, minutes.violated, width=1.0, align="edge", color=COLOURS[1])
    lost.set_ylabel("violated, each minute")
    lost.set_xlabel("minute of the trace")
    return figure
