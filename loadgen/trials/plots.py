"""Plots of a comparison, as SVG: violations, latencies, and both over load ([qoserve] Figures 10
and 11); and the requests in the plane of TTFT and TPOT ([sola] Figures 1 and 9).
"""

from collections.abc import Iterator, Sequence
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

from loadgen.trials.comparison import Comparison, Latencies, Round
from loadgen.trials.figures import Figures, Group, Percentiles
from loadgen.trials.figures_table import circumstances, named, owed
from shared.errors import ConfigError
from shared.rules.tiers import TierSet
from shared.vocabulary import Slo

# Okabe and Ito's colours, which most colour-blind readers can distinguish; beyond eight policies
# they are used again, dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
DASHES = ("-", "--", ":")
# loadgen/bound knows no draft model: a policy that speculates may do better
BOUND, BOUND_COLOUR = "bound without drafts", "#666666"
QUANTILES = np.linspace(0, 1, 401)  # of a distribution: as many as the eye can see
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


def write_plots(rounds: Sequence[Round], tiers: TierSet, folder: Path) -> Iterator[Path]:
    """Write the plots, and yield each file as it is written. Raises ConfigError if one cannot be
    written.
    """
    comparisons = [one.comparison for one in rounds]
    for one in rounds:
        suffix = f"-at-{one.comparison.rate_rps:g}" if len(rounds) > 1 else ""
        yield write(violations(one.comparison, tiers), folder / f"violations{suffix}.svg")
        yield write(latency_distributions(one, tiers), folder / f"latency{suffix}.svg")
        if any(len(latencies.plane) for each in one.latencies for latencies in each.values()):
            yield write(plane(one, tiers), folder / f"plane{suffix}.svg")
    if len(rounds) > 1:
        yield write(violations_over_load(comparisons, tiers), folder / "violations-over-load.svg")
        yield write(latency_over_load(comparisons, tiers), folder / "latency-over-load.svg")


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
        percents = [100 * _violated(policy, group) for group in groups]
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
        [name if name == "all" else f"{name}\n{owed(tiers.tiers[name].slo)}" for name in groups],
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("violated, % of offered")
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure


def latency_distributions(one: Round, tiers: TierSet) -> Figure:
    """A row for TTFT and one for TTLT, a column per tier; a tier's bound is a vertical line."""
    found, shown = one.comparison, _shown([one.comparison], tiers)
    title = "Latency of requests, cumulative"
    figure, every = new_figure(
        2, len(shown), title, circumstances(found.policies[0], found.rate_rps), sharey=True
    )
    for place, tier in enumerate(shown):
        slo = tiers.tiers[tier].slo
        for row, (what, bound_s) in enumerate((("TTFT", slo.ttft_s), ("TTLT", slo.ttlt_s))):
            axes = every[row * len(shown) + place]
            for n, (policy, latencies) in enumerate(
                zip(found.policies, one.latencies, strict=True)
            ):
                values_s = _of(latencies, tier, row)
                if len(values_s):
                    axes.plot(
                        np.quantile(values_s, QUANTILES),
                        100 * QUANTILES,
                        **line_of(n),
                        label=named(policy.policy, policy.settings),
                    )
            axes.set_xscale("log")
            bound_line(axes, bound_s)
            plain(axes.xaxis)
            axes.set_title(f"{tier}: {what}")
            axes.set_xlabel("s, log scale")
            axes.set_ylim(0, 101)
            axes.yaxis.set_major_formatter("{x:.0f} %")
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right upper")
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
        if any(tier in each and len(each[tier].plane) for each in one.latencies)
    ]
    every = np.concatenate(
        [each[tier].plane for each in one.latencies for tier in shown if tier in each]
    )
    low, high = every.min(axis=0), every.max(axis=0)
    for axes, policy, latencies in zip(panels, found.policies, one.latencies, strict=True):
        within = np.concatenate([latencies[tier].plane for tier in shown if tier in latencies])
        for n, tier in enumerate(shown):
            points = latencies[tier].plane if tier in latencies else within[:0]
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
    """A dot for each of [points, 2]: a very short stroke with round ends, which takes less of a
    file than a marker.
    """
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
    """[qoserve] Figure 11: violations of all requests with the bound, of each tier, of short and of
    long prompts.
    """
    panels = ["all", *_shown(found, tiers), "short", "long"]
    figure, every = new_figure(
        -(-len(panels) // 3),
        3,
        "Requests whose SLO was violated, over load",
        circumstances(found[0].policies[0], None),
    )
    rates = [one.rate_rps for one in found]
    for axes, panel in zip(every, panels, strict=False):
        curves = [
            [100 * _violated(one.policies[n], panel) for one in found]
            for n in range(len(found[0].policies))
        ]
        for n, curve in enumerate(curves):
            axes.plot(rates, curve, marker="o", markersize=3, **line_of(n))
        if panel == "all":
            bound = [100 * one.bound.violated_fraction for one in found]
            axes.plot(rates, bound, color=BOUND_COLOUR, linestyle="--", linewidth=1)
            curves.append(bound)
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        axes.set_title(
            {"all": "all requests", "short": "short prompts", "long": "long prompts"}.get(
                panel, panel
            )
        )
        _axes_over_load(axes, rates, "violated, %")
        _label_ends(
            axes, rates[-1], curves, _names(found[0].policies) + ([BOUND] if panel == "all" else [])
        )
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
    rates = [one.rate_rps for one in found]
    for place, tier in enumerate(shown):
        slo = tiers.tiers[tier].slo
        what, bound_s = ("TTFT", slo.ttft_s) if slo.interactive else ("TTLT", slo.ttlt_s)
        for row, percentile in enumerate(("p50", "p95")):
            axes = every[row * len(shown) + place]
            curves = [
                [_percentile(one.policies[n], tier, slo, percentile) for one in found]
                for n in range(len(found[0].policies))
            ]
            for n, curve in enumerate(curves):
                axes.plot(rates, curve, marker="o", markersize=3, **line_of(n))
            axes.set_yscale("log")
            if bound_s is not None and bound_s < FAR * axes.get_ylim()[1]:
                axes.axhline(bound_s, color=BOUND_COLOUR, linestyle="--", linewidth=1)
                axes.annotate(
                    f"SLO {bound_s:g} s",
                    (rates[0], bound_s),
                    fontsize=7,
                    color=BOUND_COLOUR,
                    va="bottom",
                )
            plain(axes.yaxis)
            axes.set_title(f"{tier}: {what} {percentile}")
            _axes_over_load(axes, rates, "s, log scale")
            _label_ends(axes, rates[-1], curves, _names(found[0].policies))
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


def _names(policies: Sequence[Figures]) -> list[str]:
    return [named(found.policy, found.settings) for found in policies]


def _shown(found: Sequence[Comparison], tiers: TierSet) -> list[str]:
    """The tiers that have any requests, tightest first."""
    return [
        name
        for name in tiers.tiers
        if any(name in figures.by_tier for one in found for figures in one.policies)
    ]


def _violated(found: Figures, panel: str) -> float:
    if panel == "all":
        return found.violated_fraction
    group: Group | None = (
        found.by_length[panel] if panel in ("short", "long") else found.by_tier.get(panel)
    )
    return group.violated_fraction if group is not None else 0.0


def _of(latencies: dict[str, Latencies], tier: str, row: int) -> Any:
    return latencies[tier][row] if tier in latencies else ()


def _percentile(found: Figures, tier: str, slo: Slo, percentile: str) -> float:
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
    """Set ticks at 0.1, 0.2, 0.5, 1 rather than at powers of ten, as many as there is room for.
    Call it after all is drawn.
    """
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < ROOMY * low else (1,), numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _axes_over_load(axes: Axes, rates: Sequence[float], unit: str) -> None:
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xlabel("requests/s")
    axes.set_ylabel(unit)


def _label_ends(
    axes: Axes, at: float, curves: Sequence[Sequence[float]], names: Sequence[str]
) -> None:
    """Put each name at the right end of its line, moved up where two would overlap."""
    to_axes = (axes.transScale + axes.transLimits).transform
    ends = [
        (to_axes((at, curve[-1]))[1], n) for n, curve in enumerate(curves) if np.isfinite(curve[-1])
    ]
    lowest = -1.0
    for height, n in sorted(ends):
        lowest = max(height, lowest + LABEL_GAP)
        colour = BOUND_COLOUR if names[n] == BOUND else COLOURS[n % len(COLOURS)]
        axes.annotate(
            names[n],
            (1.0, lowest),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=7,
            color=colour,
            va="center",
        )


def write(figure: Figure, path: Path) -> Path:
    try:
        figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path
