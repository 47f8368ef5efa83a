"""Draws what routers keep and find over the number of replicas: a column of panels for each load, a
colour for each router, a dash for each policy.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from loadgen.lab.routers.runs import Row
from loadgen.trials.plots import COLOURS, DASHES, new_figure, plain, write

Panels = Mapping[str, Callable[[Row], float]]

SERVED: Panels = {
    "SLOs met, %": lambda row: 100 * row.met,
    "found of prompts, %": lambda row: 100 * row.found,
    "goodput a replica, requests/s": lambda row: row.goodput_rps / row.job.replicas,
}
LATENCY: Panels = {
    "TTFT p50, s": lambda row: row.ttft_p50_s,
    "TTFT p99, s": lambda row: row.ttft_p99_s,
    "busiest replica, of the mean": lambda row: row.imbalance,
}
BELOW = "simulated A100, an 8B model; arrivals grow with the replicas"


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes both plots."""
    return [
        write(over_replicas(rows, "Prompts that begin alike", SERVED), folder / "prefixes.svg"),
        write(
            over_replicas(rows, "Prompts that begin alike: latency and balance", LATENCY),
            folder / "prefixes-latency.svg",
        ),
    ]


def over_replicas(rows: Sequence[Row], title: str, panels: Panels) -> Figure:
    loads = list(dict.fromkeys(row.job.load for row in rows))
    policies = list(dict.fromkeys(row.job.policy for row in rows))
    routers = list(dict.fromkeys(row.job.router for row in rows))
    figure, every = new_figure(len(panels), len(loads), title, BELOW)
    for n, (name, value) in enumerate(panels.items()):
        for m, load in enumerate(loads):
            axes = every[n * len(loads) + m]
            for i, router in enumerate(routers):
                for k, policy in enumerate(policies):
                    of = [
                        row
                        for row in rows
                        if (row.job.load, row.job.router, row.job.policy) == (load, router, policy)
                    ]
                    axes.plot(
                        [row.job.replicas for row in of],
                        [value(row) for row in of],
                        DASHES[k],
                        color=COLOURS[i],
                        marker="o",
                        markersize=3,
                        linewidth=1.5,
                        label=f"{router}, {policy}",
                    )
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(dict.fromkeys(row.job.replicas for row in rows)))
            axes.xaxis.set_major_formatter("{x:g}")
            if name.startswith("TTFT"):
                axes.set_yscale("log")
                plain(axes.yaxis)
            if n == 0:
                axes.set_title(load)
            if m == 0:
                axes.set_ylabel(name)
            axes.set_xlabel("replicas")
    figure.legend(*every[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    return figure
