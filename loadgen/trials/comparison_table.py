"""Policies side by side as a table: a column each, tiers as rows, and last the bound that no
scheduler without a draft model can beat.
"""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from loadgen.load.report import percent, promise, seconds
from loadgen.trials.comparison import Comparison
from loadgen.trials.figures_table import named
from shared.rules.tiers import TierSet

# loadgen/bound knows no draft model: a policy that speculates may do better
BOUND = "bound\nwithout\ndrafts"


def comparison_table(rounds: Sequence[Comparison], tiers: TierSet) -> Table:
    """The table of these rounds: percentages of requests violated, a rate's least in bold."""
    out = Table(
        title="Requests whose SLO was violated",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    out.add_column("")
    for found in rounds[0].policies:
        # a line for the policy, and for each setting one for its key and one for its value
        name = named(found.policy, found.settings)
        head = name.replace(":", "\n").replace("+", "\n").replace("=", "=\n")
        out.add_column(escape(head), justify="right")
    out.add_column(BOUND, justify="right", style="dim")
    for one in rounds:
        if len(rounds) > 1:
            out.add_row(f"{one.rate_rps:g} requests/s", style="bold")
        _rows(out, one, tiers)
    return out


def _rows(out: Table, one: Comparison, tiers: TierSet) -> None:
    found = one.policies
    least = min(each.violated_fraction for each in found)
    totals = [
        f"[bold]{percent(each.violated_fraction)}[/]"
        if each.violated_fraction == least
        else percent(each.violated_fraction)
        for each in found
    ]
    out.add_row("all", *totals, percent(one.bound.violated_fraction))
    for name, tier in tiers.tiers.items():
        groups = [each.by_tier.get(name) for each in found]
        if any(groups):
            owed = promise(tier.slo).replace(", ", "\n")
            parts = [percent(group.violated_fraction) if group else "-" for group in groups]
            out.add_row(f"{escape(name)}\n[dim]{owed}[/]", *parts)
        if (tier.slo.tbt_s or tier.slo.tbt_x) and any(groups):
            gaps = [seconds(group.tbt_s.p99) if group else "-" for group in groups]
            out.add_row("[dim]gaps, p99[/]", *gaps, style="dim")
    for name in ("short", "long"):
        parts = [percent(each.by_length[name].violated_fraction) for each in found]
        out.add_row(f"{name} prompts", *parts)
    out.add_row("relegated", *(str(each.relegated) for each in found))
    out.add_section()
