"""The rows as Markdown tables and as a plot."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from loadgen.bench.machine import Machine
from loadgen.lab.live_drafts.rising_load import RisingLoad
from loadgen.lab.live_drafts.trial_run import Attained, Row
from loadgen.lab.live_drafts.turns import Turns, by_policy
from loadgen.lab.live_drafts.worth import Phases, gain
from loadgen.markdown import table
from loadgen.trials.plots import line_of, new_figure, write
from shared.perf.draft import fractions_of

POINTS = 3.0  # by which the simulator may differ


class Comparison(Struct, frozen=True, kw_only=True):
    """The contents of result.json."""

    command: str
    began: str  # UTC
    seed: int
    rates_per_s: Sequence[float]
    paces_s: Sequence[float]
    duration_s: float
    machine: Machine
    load_average: tuple[float, float]  # of a minute, before the first run and after the last
    rows: list[Row]  # in the order in which they were served

    @property
    def load(self) -> RisingLoad:
        return RisingLoad(self.rates_per_s, self.duration_s, self.paces_s, self.seed)


def markdown(found: Comparison) -> str:
    turns = by_policy(found.rows)
    rows = [one.row for one in turns]
    return "\n\n".join([_heading(found), _attained(found, turns), _phases(rows), _worth(rows)])


def _heading(found: Comparison) -> str:
    rates = ", ".join(f"{rate:g}" for rate in found.rates_per_s)
    paces = ", ".join(f"{1e3 * pace_s:g}" for pace_s in found.paces_s)
    before, after = found.load_average
    return (
        f"{found.began}, `{found.command}` ({_seeds(found)}), {found.machine}; load average "
        f"{before:.1f} before the first run, {after:.1f} after the last. "
        f"{found.rows[0].requests} requests a turn, {rates} a second for "
        f"{found.load.stage_s:g} s each; TPOT {paces} ms. Threads: {_threads(found)}."
    )


def _seeds(found: Comparison) -> str:
    """The seeds of the loads, of which each turn of all policies has one."""
    first, *others = sorted({row.seed for row in found.rows})
    return f"seeds {first} to {others[-1]}" if others else f"seed {first}"


def _threads(found: Comparison) -> str:
    """The numbers of threads with which engines computed."""
    numbers = sorted({row.threads or 0 for row in found.rows})
    return ", ".join(str(number) if number else "not recorded" for number in numbers)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _attained(found: Comparison, turns: Sequence[Turns]) -> str:
    tiers = list(found.load.tiers.tiers)
    rates = [f"at {rate:g}/s" for rate in found.rates_per_s]
    head = [
        "SLO met, %", "all: live", "simulated", "apart", *tiers, *rates,
        "tokens/s in SLO: live", "simulated",
    ]  # fmt: skip
    rows = []
    for each in turns:
        live, told = each.row.live, each.row.simulated
        rows.append(
            [
                _code(each.row),
                _percent(live.met) + _span(each, lambda row: row.live.met, ".1f"),
                _percent(told.met),
                f"{100 * (live.met - told.met):+z.1f}" + _span(each, _apart, "+.1f"),
                *(_pair(live.by_tier[tier], told.by_tier[tier]) for tier in tiers),
                *map(_pair, live.by_stage, told.by_stage),
                f"{live.goodput_tokens_per_s:.0f}",
                f"{told.goodput_tokens_per_s:.0f}",
            ]
        )
    return table(head, rows)


def _span(turns: Turns, value: Callable[[Row], float], form: str) -> str:
    """From the turn with the least to that with the most, if there are several."""
    if len(turns.each) == 1:
        return ""
    least, most = turns.span(value)
    return f" ({100 * least:{form}} to {100 * most:{form}})"


def _apart(row: Row) -> float:
    return row.live.met - row.simulated.met


def _pair(live: float, simulated: float) -> str:
    return f"{100 * live:.0f} ({100 * simulated:.0f})"


def _phases(policies: Sequence[Row]) -> str:
    head = [
        "iterations", "with drafts", "decodes", "tokens per verification: live", "simulated",
        "draft, ms", "verification", "rest", "without drafts", "decodes", "pass, ms", "rest",
        "draft step, read", "acceptance", "over the fit",
    ]  # fmt: skip
    rows = []
    for row in policies:
        with_, without = row.verifying, row.plain
        cost = fractions_of(row.cost)
        rows.append(
            [
                _code(row),
                f"{with_.iterations}",
                _if(with_, f"{with_.decodes:.1f}"),
                _yield(row.live),
                _yield(row.simulated),
                *(_if(with_, f"{1e3 * s:.2f}") for s in _three(with_)),
                f"{without.iterations}",
                _if(without, f"{without.decodes:.1f}"),
                *(_if(without, f"{1e3 * s:.2f}") for s in (without.pass_s, without.rest_s)),
                ", ".join(f"{part:.2f}" for part in cost),
                f"{row.acceptance:.2f}",
                f"{row.times:.2f}",
            ]
        )
    return table(head, rows)


def _code(row: Row) -> str:
    return f"`{row.policy_with_settings}`{row.on_engine}"


def _three(phases: Phases) -> tuple[float, float, float]:
    return phases.draft_s, phases.pass_s, phases.rest_s


def _if(phases: Phases, text: str) -> str:
    return text if phases.iterations else ""


def _yield(attained: Attained) -> str:
    tokens = attained.tokens_per_verification
    return "" if tokens is None else f"{tokens:.2f}"


def _plain(rows: Sequence[Row], engine: str) -> Row | None:
    """The row whose iterations of plain decodes the others are compared with."""
    every = [row for row in rows if row.engine == engine]
    return next((row for row in every if not row.verifying.iterations), None)


def _worth(policies: Sequence[Row]) -> str:
    """Speed with drafts over that without, by decodes in the iteration; and how often a policy
    that chooses has drafted there.
    """
    columns = []
    head = ["decodes at once", "without drafts, ms"]
    for row in policies:
        plain = _plain(policies, row.engine)
        if plain is None or not row.verifying.iterations:
            continue
        columns.append((row, plain))
        head.append(_code(row))
    rows = []
    first = _plain(policies, policies[0].engine)
    for n, band in enumerate(policies[0].bands):
        cells = [band.name]
        if first is None or not first.bands[n].plain.iterations:
            cells.append("")
        else:
            cells.append(f"{1e3 * first.bands[n].plain.pass_s:.1f}")
        for row, plain in columns:
            over = gain(row.bands[n].drafting, plain.bands[n].plain)
            share = row.bands[n].drafts_fraction
            drafted = "" if share is None else f"{100 * share:.0f} %"
            cells.append(drafted if over is None else f"{over:.2f} x, {drafted}")
        rows.append(cells)
    return table(head, rows)


def plot(found: Comparison, path: Path) -> Path:
    """Attainment over the rate, live and simulated; and the worth of drafts over the decodes."""
    figure, [kept, worth] = new_figure(
        1, 2, "Drafts, live", f"{_seeds(found)}, {found.began}", width=10.0
    )
    rows = [one.row for one in by_policy(found.rows)]
    for n, row in enumerate(rows):
        look = line_of(n)
        kept.plot(
            found.rates_per_s, [100 * met for met in row.live.by_stage], **look, label=row.name
        )
        kept.plot(
            found.rates_per_s,
            [100 * met for met in row.simulated.by_stage],
            **look | {"linestyle": ":", "marker": "o", "markersize": 3},
        )
        plain = _plain(rows, row.engine)
        if plain is None or not row.verifying.iterations:
            continue
        places, over = [], []
        for band, without in zip(row.bands, plain.bands, strict=True):
            value = gain(band.drafting, without.plain)
            if value is not None:
                places.append(band.drafting.decodes)
                over.append(value)
        worth.plot(places, over, **look, marker="o", markersize=3)
    kept.set_xlabel("requests/s (dotted: simulated)")
    kept.set_ylabel("SLO met, % of offered")
    kept.set_ylim(0, 102)
    worth.axhline(1.0, color="#666666", linewidth=0.8)
    worth.set_xscale("log", base=2)
    worth.set_xlabel("decodes in the iteration")
    worth.set_ylabel("speed over that without drafts")
    kept.legend(frameon=False, fontsize=7)
    return write(figure, path)


def farthest(found: Comparison) -> float:
    """The points by which live and simulated attainment of a policy differ most."""
    rows = [one.row for one in by_policy(found.rows)]
    return max((100 * abs(_apart(row)) for row in rows), default=math.nan)
