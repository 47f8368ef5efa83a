"""Plots of a comparison: violations and latencies over load ([qoserve] Figures 10 and 11), and the
requests in the plane of TTFT and TPOT ([sola] Figures 1 and 9).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import LogLocator, NullFormatter

from loadgen import writing
from loadgen.load.report import promise
from loadgen.trials.comparison import Comparison, Round
from loadgen.trials.figures import Figures, Group, Percentiles
from loadgen.trials.figures_table import circumstances, named
from shared.rules.tiers import TierSet
from shared.vocabulary import Slo

# Okabe and Ito's colours, which most colour-blind readers can distinguish; beyond eight policies
# they are used again, dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
DASHES = ("-", "--", ":")
# loadgen/bound knows no draft model: a policy that speculates may do better
BOUND, BOUND_COLOUR = "bound without drafts", "#666666"
FAR = 4  # a bound so many times beyond the measured values is left out: it would squeeze the rest
ROOMY = 300  # an axis that spans less has room for ticks between powers of ten
POINTS = 800  # of a panel: more cannot be distinguished
LABEL_GAP = 0.045  # between two labels, of the height of the axes

mpl.rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#e6e6e6",
        "axes.axisbelow": True,
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "svg.hashsalt": "slackline",  # the same figures give the same file
    }
)


def violations(found: Comparison, tiers: TierSet) -> Figure:
    """Bars for all requests and for each tier; the bound is that of all requests."""
    groups = ["all", *_shown([found], tiers)]
    policies = found.policies
    figure, [axes] = new_figure(
        1,
        1,
        "Requests whose SLO was violated",
        circumstances(policies[0], found.rate_rps),
        width=max(7.0, 1.9 * len(groups)),
    )
    width = 0.8 / len(policies)
    for n, policy in enumerate(policies):
        at = [place - 0.4 + width * (n + 0.5) for place in range(len(groups))]
        percents = [_violated(group, policy) for group in groups]
        bars = axes.bar(
            at,
            percents,
            0.92 * width,
            color=COLOURS[n % len(COLOURS)],
            label=named(policy.policy, policy.settings),
        )
        axes.bar_label(
            bars, [f"{value:.1f}" for value in percents], padding=1, fontsize=7, color="#444444"
        )
    bound = 100 * found.bound.violated_fraction
    axes.hlines(
        bound,
        -0.46,
        0.46,
        color=BOUND_COLOUR,
        linestyle="--",
        label=f"{BOUND}, of all: {bound:.1f} %",
    )
    axes.set_xticks(
        range(len(groups)),
        [name if name == "all" else f"{name}\n{promise(tiers.tiers[name].slo)}" for name in groups],
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("violated, % of offered")
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure


def plane(one: Round, tiers: TierSet) -> Figure:
    """[sola] Figures 1 and 9: a panel for each policy, a point for each request that has both
    bounds, and the box of the requests within both.
    """
    found = one.comparison
    title = "TTFT and mean TPOT of requests, each over its bound"
    below = circumstances(found.policies[0], found.rate_rps)
    figure, panels = new_figure(
        1,
        len(found.policies),
        title,
        below,
        width=max(7.0, 3.6 * len(found.policies)),
        sharex=True,
        sharey=True,
    )
    shown = [
        tier
        for tier in _shown([found], tiers)
        if any(len(each.get(tier, ())) for each in one.planes)
    ]
    every = np.concatenate([each[tier] for each in one.planes for tier in shown if tier in each])
    low, high = every.min(axis=0), every.max(axis=0)
    for axes, policy, each in zip(panels, found.policies, one.planes, strict=True):
        within = np.concatenate([each[tier] for tier in shown if tier in each])
        for n, tier in enumerate(shown):
            points = each.get(tier, within[:0])
            points = points[:: max(1, -(-len(within) // POINTS))]
            if len(points):
                axes.add_patch(
                    _dots(points, COLOURS[n % len(COLOURS)], tier if len(shown) > 1 else "")
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(0.8 * min(low[0], 1), 1.25 * max(high[0], 1))
        axes.set_ylim(0.8 * min(low[1], 1), 1.25 * max(high[1], 1))
        axes.plot((1, 1, 0), (0, 1, 1), color=BOUND_COLOUR, linestyle="--", linewidth=1)
        plain(axes.xaxis)
        plain(axes.yaxis)
        share = 100 * (within <= 1).all(axis=1).mean() if len(within) else 0.0
        axes.set_title(
            f"{named(policy.policy, policy.settings)}\n"
            f"{share:.1f} % of those that finished within both",
            fontsize=8,
        )
        axes.set_xlabel("TTFT / SLO")
    panels[0].set_ylabel("mean TPOT / SLO")
    if len(shown) > 1:
        figure.legend(
            *panels[0].get_legend_handles_labels(), frameon=False, loc="outside right upper"
        )
    return figure


def _dots(points: Any, colour: str, label: str) -> PathPatch:
    """A dot for each of [points, 2]: a very short round stroke is smaller than a marker."""
    outline = Outline(
        np.stack((points, 1.001 * points), axis=1).reshape(-1, 2),
        np.tile((Outline.MOVETO, Outline.LINETO), len(points)),
    )
    outline.should_simplify = False
    return PathPatch(
        outline,
        fill=False,
        edgecolor=colour,
        linewidth=2.2,
        capstyle="round",
        alpha=0.6,
        label=label,
    )


def violations_over_load(found: Sequence[Comparison], tiers: TierSet) -> Figure:
    """[qoserve] Figure 11: violations of all with the bound, by tier, of short and long prompts."""
    panels = ["all", *_shown(found, tiers), "short", "long"]
    figure, every = new_figure(
        -(-len(panels) // 3),
        3,
        "Requests whose SLO was violated, over load",
        circumstances(found[0].policies[0], None),
    )
    for axes, panel in zip(every, panels, strict=False):
        curves = _lines(axes, found, partial(_violated, panel))
        if panel == "all":
            curves[BOUND] = [100 * one.bound.violated_fraction for one in found]
            rates = [one.rate_rps for one in found]
            axes.plot(rates, curves[BOUND], color=BOUND_COLOUR, linestyle="--", linewidth=1)
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        axes.set_title(
            {"all": "all requests", "short": "short prompts", "long": "long prompts"}.get(
                panel, panel
            )
        )
        _finish(axes, found, "violated, %", curves)
    for axes in every[len(panels) :]:
        axes.remove()
    return figure


def latency_over_load(found: Sequence[Comparison], tiers: TierSet) -> Figure:
    """[qoserve] Figure 10: median and 95th percentile of each tier's TTFT, or of its TTLT where the
    tier is not interactive; missing where no request finished.
    """
    shown = _shown(found, tiers)
    figure, every = new_figure(
        2, len(shown), "Latency of requests, over load", circumstances(found[0].policies[0], None)
    )
    for place, tier in enumerate(shown):
        slo = tiers.tiers[tier].slo
        what, bound_s = ("TTFT", slo.ttft_s) if slo.interactive else ("TTLT", slo.ttlt_s)
        for row, percentile in enumerate(("p50", "p95")):
            axes = every[row * len(shown) + place]
            curves = _lines(axes, found, partial(_percentile, tier, slo, percentile))
            axes.set_yscale("log")
            if bound_s is not None and bound_s < FAR * axes.get_ylim()[1]:
                axes.axhline(bound_s, color=BOUND_COLOUR, linestyle="--", linewidth=1)
                axes.annotate(
                    f"SLO {bound_s:g} s",
                    (found[0].rate_rps, bound_s),
                    fontsize=7,
                    color=BOUND_COLOUR,
                    va="bottom",
                )
            plain(axes.yaxis)
            axes.set_title(f"{tier}: {what} {percentile}")
            _finish(axes, found, "s, log scale", curves)
    return figure


def new_figure(
    rows: int,
    columns: int,
    title: str,
    subtitle: str,
    *,
    width: float = 0.0,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot, which would keep every figure and choose a backend."""
    figure = Figure(
        figsize=(width or 3.6 * columns, 1.2 + 2.6 * rows if rows > 1 else 4.4),
        layout="constrained",
    )
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(subtitle, x=0.01, ha="left", fontsize=8, color="#555555")
    return figure, list(axes.flat)


def line_of(n: int) -> dict[str, Any]:
    return {
        "color": COLOURS[n % len(COLOURS)],
        "linestyle": DASHES[n // len(COLOURS) % len(DASHES)],
        "linewidth": 1.5,
    }


def _lines(
    axes: Axes, found: Sequence[Comparison], value: Callable[[Figures], float]
) -> dict[str, list[float]]:
    """Draws a line over load for each policy. Returns their values by name."""
    curves = {}
    for n, policy in enumerate(found[0].policies):
        curve = [value(one.policies[n]) for one in found]
        axes.plot([one.rate_rps for one in found], curve, marker="o", markersize=3, **line_of(n))
        curves[named(policy.policy, policy.settings)] = curve
    return curves


def _shown(found: Sequence[Comparison], tiers: TierSet) -> list[str]:
    """The tiers that have any requests, tightest first."""
    return [
        name
        for name in tiers.tiers
        if any(name in figures.by_tier for one in found for figures in one.policies)
    ]


def _violated(panel: str, found: Figures) -> float:
    """The percentage of violated requests that a panel shows."""
    groups = found.by_length if panel in ("short", "long") else found.by_tier
    group: Figures | Group | None = found if panel == "all" else groups.get(panel)
    return 100 * group.violated_fraction if group is not None else 0.0


def _percentile(tier: str, slo: Slo, percentile: str, found: Figures) -> float:
    group = found.by_tier.get(tier)
    spread: Percentiles | None = (
        None if group is None else group.ttft_s if slo.interactive else group.ttlt_s
    )
    value: float | None = None if spread is None else getattr(spread, percentile)
    return float("nan") if value is None else value


def bound_line(axes: Axes, bound_s: float | None) -> None:
    if bound_s is not None and bound_s < FAR * axes.get_xlim()[1]:
        axes.axvline(bound_s, color=BOUND_COLOUR, linestyle="--", linewidth=1)
        axes.annotate(
            f"SLO {bound_s:g} s ", (bound_s, 4), fontsize=7, color=BOUND_COLOUR, ha="right"
        )


def plain(axis: Axis) -> None:
    """Sets ticks at 0.1, 0.2, 0.5, 1, where they have room. Call it after all is drawn."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < ROOMY * low else (1,), numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _finish(
    axes: Axes, found: Sequence[Comparison], unit: str, curves: Mapping[str, Sequence[float]]
) -> None:
    """Name the axes, and each line at its right end, moved up where names would overlap."""
    rates = [one.rate_rps for one in found]
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xlabel("requests/s")
    axes.set_ylabel(unit)
    to_axes = (axes.transScale + axes.transLimits).transform
    ends = [
        (to_axes((rates[-1], curve[-1]))[1], n, name)
        for n, (name, curve) in enumerate(curves.items())
        if np.isfinite(curve[-1])
    ]
    lowest = -1.0
    for height, n, name in sorted(ends):
        lowest = max(height, lowest + LABEL_GAP)
        colour = BOUND_COLOUR if name == BOUND else COLOURS[n % len(COLOURS)]
        axes.annotate(
            name,
            (1.0, lowest),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=7,
            color=colour,
            va="center",
        )


def write(figure: Figure, path: Path) -> Path:
    drawn = BytesIO()
    figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
    writing.write(path, drawn.getvalue(), "--plots")
    return path
