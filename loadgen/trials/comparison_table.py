"""Policies side by side as a table: a row each, tiers as columns, and last the bound that no
scheduler without a draft model can beat.
"""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from loadgen.load.report import percent, promise
from loadgen.trials.comparison import Comparison
from loadgen.trials.figures_table import named
from shared.rules.tiers import TierSet

# loadgen/bound knows no draft model: a policy that speculates may do better
BOUND = "bound without drafts: at least"


def comparison_table(rounds: Sequence[Comparison], tiers: TierSet) -> Table:
    """The table of these rounds: percentages of requests violated, a rate's least in bold."""
    out = Table(title="Requests whose SLO was violated", title_justify="left", box=SIMPLE_HEAD)
    out.add_column("policy", overflow="fold", min_width=len(BOUND))
    out.add_column("all", justify="right", no_wrap=True)
    shown = [
        name
        for name in tiers.tiers
        if any(name in found.by_tier for one in rounds for found in one.policies)
    ]
    for name in shown:
        out.add_column(
            f"{escape(name)}\n[dim]{promise(tiers.tiers[name].slo).replace(', ', chr(10))}[/]",
            justify="right",
        )
    for name in ("short", "long", "relegated"):
        out.add_column(name, justify="right", no_wrap=True)
    for one in rounds:
        if len(rounds) > 1:
            out.add_row(f"{one.rate_rps:g} requests/s", style="bold")
        least = min(found.violated_fraction for found in one.policies)
        for found in one.policies:
            best = found.violated_fraction == least
            total = percent(found.violated_fraction)
            out.add_row(
                escape(named(found.policy, found.settings)),
                f"[bold]{total}[/]" if best else total,
                *(
                    percent(group.violated_fraction) if (group := found.by_tier.get(name)) else "-"
                    for name in shown
                ),
                *(percent(found.by_length[name].violated_fraction) for name in ("short", "long")),
                str(found.relegated),
            )
        out.add_row(BOUND, percent(one.bound.violated_fraction), style="dim", end_section=True)
    return out
