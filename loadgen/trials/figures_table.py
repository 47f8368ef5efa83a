"""A simulated run's figures as a table: by tier, then by importance and by length; and, in words,
its circumstances and its policy.
"""

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table

from loadgen.load.report import percent, promise, seconds
from loadgen.load.session import Sessions
from loadgen.trials.figures import Figures, Group, Percentiles
from shared.rules.tiers import TierSet


def figures_table(found: Figures, tiers: TierSet) -> Table:
    """The table of a run."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    out.add_column("")
    latencies = (f"{name}\np50\np99" for name in ("TTFT", "TBT", "TTLT"))
    for name in ("SLO", "offered", "violated", "why", *latencies):
        words = name in ("SLO", "why")
        out.add_column(name, justify="left" if words else "right", no_wrap=not words)

    def row(name: str, slo: str, group: Group) -> None:
        spreads = (both(spread) for spread in (group.ttft_s, group.tbt_s, group.ttlt_s))
        out.add_row(
            name,
            slo.replace(", ", "\n"),
            str(group.offered),
            percent(group.violated_fraction) if group.offered else "-",
            _why(group),
            *spreads,
        )

    for name, tier in tiers.tiers.items():
        if group := found.by_tier.get(name):
            row(name, promise(tier.slo), group)

    for name, group in (found.by_model or {}).items():
        row(f"model {name}", "", group)

    def total(name: str, of: str, whole: Figures | Sessions) -> None:
        violated = percent(whole.violated_fraction)
        out.add_row(name, of, str(whole.offered), violated, style="bold")

    total("all", "", found)
    if found.by_session is not None:
        total("sessions", "all rounds", found.by_session)
    out.add_section()
    if len(found.by_importance) > 1:
        for name, group in found.by_importance.items():
            row(f"importance {name}", "", group)
    for name, group in found.by_length.items():
        row(f"{name} prompts", "", group)
    return out


def circumstances(found: Figures, rate_rps: float | None) -> str:
    """The circumstances that decide the figures, in one line. `rate_rps` None: several rates."""
    latency = (
        "no control latency" if found.latency == "none" else f"control latency: {found.latency}"
    )
    replicas = "1 replica" if found.replicas == 1 else f"{found.replicas} replicas"
    if found.roles:
        replicas += f" ({', '.join(found.roles)}, {found.link_gbit_s:g} Gbit/s)"
    rate = "" if rate_rps is None else f"{rate_rps:g} requests/s for "
    load = f"{found.workload}, {rate}{found.duration_s:g} s of arrivals, seed {found.seed}"
    return f"{load}; {replicas} of {found.profile}, {latency}; SLOs judged by {found.definition}"


def named(policy: str, settings: Mapping[str, str]) -> str:
    """The policy with its settings, as `slackline compare --policies` takes them."""
    return policy + (
        ":" + "+".join(f"{key}={value}" for key, value in settings.items()) if settings else ""
    )


def both(spread: Percentiles) -> str:
    return "-" if spread.p50 is None else f"{seconds(spread.p50)}\n{seconds(spread.p99)}"


def _why(group: Group) -> str:
    why = group.violations
    kinds = (
        ("TTFT", why.ttft),
        ("TBT", why.tbt),
        ("TTLT", why.ttlt),
        ("unfinished", why.unfinished),
    )
    return "\n".join(f"{count} {kind}" for kind, count in kinds if count)
