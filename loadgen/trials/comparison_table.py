"""Policies side by side as a table: a column each, tiers as rows, and last the bound that no
scheduler without a draft model can beat.
"""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from loadgen.load.report import promise, seconds
from loadgen.trials.comparison import Comparison
from loadgen.trials.figures import Figures, Group
from loadgen.trials.figures_table import named
from loadgen.trials.interval import Interval, interval
from shared.rules.tiers import TierSet

# loadgen/bound knows no draft model: a policy that speculates may do better
BOUND = "bound\nwithout\ndrafts"


def comparison_table(rates: Sequence[Sequence[Comparison]], tiers: TierSet) -> Table:
    """The table of [rates, seeds] comparisons: percentages of requests violated, a rate's least in
    bold. Several seeds give means and intervals.
    """
    out = Table(
        title="Requests whose SLO was violated",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    out.add_column("")
    for found in rates[0][0].policies:
        # a line for the policy, and for each setting one for its key and one for its value
        name = named(found.policy, found.settings)
        head = name.replace(":", "\n").replace("+", "\n").replace("=", "=\n")
        out.add_column(escape(head), justify="right")
    out.add_column(BOUND, justify="right", style="dim")
    for runs in rates:
        if len(rates) > 1:
            out.add_row(f"{runs[0].rate_rps:g} requests/s", style="bold")
        _rows(out, runs, tiers)
    return out


def _rows(out: Table, runs: Sequence[Comparison], tiers: TierSet) -> None:
    """[seeds] the rows of one rate."""
    policies = [[run.policies[n] for run in runs] for n in range(len(runs[0].policies))]

    def violated(groups: Sequence[Figures | Group]) -> Interval:
        return interval([group.violated_fraction for group in groups])

    totals = [violated(found) for found in policies]
    least = min(total.mean for total in totals)
    cells = [f"[bold]{t.in_percent}[/]" if t.mean == least else t.in_percent for t in totals]
    bound = interval([run.bound.violated_fraction for run in runs])
    out.add_row("all", *cells, bound.in_percent)
    for name, tier in tiers.tiers.items():
        groups = [[f.by_tier[name] for f in found if name in f.by_tier] for found in policies]
        if not all(groups):
            continue
        owed = promise(tier.slo).replace(", ", "\n")
        parts = (violated(found).in_percent for found in groups)
        out.add_row(f"{escape(name)}\n[dim]{owed}[/]", *parts)
        if tier.slo.tbt_s or tier.slo.tbt_x:
            gaps = (fmean(g.tbt_s.p99 or 0.0 for g in found) for found in groups)
            out.add_row("[dim]gaps, p99[/]", *map(seconds, gaps), style="dim")
    for name in ("short", "long"):
        parts = (violated([f.by_length[name] for f in found]).in_percent for found in policies)
        out.add_row(f"{name} prompts", *parts)
    relegated = (fmean(f.relegated for f in found) for found in policies)
    out.add_row("relegated", *(f"{mean:.3g}" for mean in relegated))
    out.add_section()
