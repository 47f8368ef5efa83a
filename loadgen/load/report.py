"""The figures of a live run, by tier, as JSON or a table; and the table of several runs."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from loadgen.load.run_course import Course, course_of_tally
from loadgen.load.tally import Outcome, Tally
from loadgen.writing import json_of, make_folder, write
from shared.errors import ConfigError
from shared.schemas import EngineTime
from shared.vocabulary import FinishReason, Slo

Values = Sequence[float] | NDArray[np.float32]

DEFINITION = (
    "An SLO is met when the request finished and kept its bounds by the definition of its tier "
    "(`deadline` where it names none: every token came by its cumulative deadline and the last one "
    "within TTLT), measured at the client from the instant of sending. All fractions are of the "
    "requests offered: what was refused, failed or never finished counts as missed. Goodput: "
    "requests that met their SLO, per second of offered load."
)


class Spread(Struct, frozen=True, kw_only=True):
    """The spread of a latency, in seconds; None where nothing was measured."""

    p50_s: float | None = None
    p99_s: float | None = None


class TierReport(Struct, frozen=True, kw_only=True):
    """The figures of one tier, or of all. Counts are requests. `ttft`, `ttlt`: one value per
    request (TTLT of finished ones); `tbt`: every gap between two tokens.
    """

    offered: int
    finished: int
    met: int
    server_met: int | None  # by the server's own verdict; None where the server sends none
    ttft: Spread
    tbt: Spread
    ttlt: Spread
    relegated: int
    refused: int
    cancelled: int
    unfinished: int  # when the run stopped waiting
    errors: int  # all other ends
    output_tokens: int
    important_offered: int
    important_met: int
    met_fraction: float | None  # of offered
    goodput_per_s: float
    slo: Slo | None = None  # None: of all tiers


class Report(Struct, frozen=True, kw_only=True):
    """One run. `rate_per_s` is the offered rate; `lateness` the time by which the generator itself
    fell behind its plan; `engines` the time of all engines together, where their heartbeats tell;
    `cached_fraction` the part of the prompt tokens that was found in a prefix cache, where the
    server says so and prompts share any.
    """

    label: str
    command: str
    transport: str
    tier_set: str
    seed: int
    planned: int
    offered_s: float
    rate_per_s: float
    interrupted: bool
    lateness: Spread
    lateness_max_s: float
    tiers: dict[str, TierReport]
    total: TierReport
    notes: list[str]
    error_samples: list[str]
    definition: str = DEFINITION
    engines: EngineTime | None = None
    course: Course | None = None
    cached_fraction: float | None = None


def spread(values_s: Values) -> Spread:
    """Percentiles, linear between values."""
    if len(values_s) == 0:
        return Spread()
    p50_s, p99_s = np.percentile(np.asarray(values_s, dtype=np.float64), (50, 99)).tolist()
    return Spread(p50_s=p50_s, p99_s=p99_s)


def summarise(
    outcomes: Sequence[Outcome], gaps_s: Values, offered_s: float, slo: Slo | None
) -> TierReport:
    """The figures of these requests. Without any requests, fractions are None."""
    ends = [outcome.ended for outcome in outcomes]
    finished, met = sum(o.finished for o in outcomes), sum(o.met for o in outcomes)
    refused, cancelled = ends.count(FinishReason.REFUSED), ends.count(FinishReason.CANCELLED)
    unfinished = ends.count("unfinished") + ends.count("")
    verdicts = [o.server_met for o in outcomes if o.server_met is not None]
    important = [o for o in outcomes if o.planned.importance > 1]
    return TierReport(
        offered=len(outcomes),
        finished=finished,
        met=met,
        server_met=sum(verdicts) if verdicts else None,
        ttft=spread([s for o in outcomes if (s := o.ttft_s) is not None]),
        tbt=spread(gaps_s),
        ttlt=spread([s for o in outcomes if (s := o.ttlt_s) is not None]),
        relegated=sum(o.relegated for o in outcomes),
        refused=refused,
        cancelled=cancelled,
        unfinished=unfinished,
        errors=len(outcomes) - finished - refused - cancelled - unfinished,
        output_tokens=sum(o.measure.tokens for o in outcomes),
        important_offered=len(important),
        important_met=sum(o.met for o in important),
        met_fraction=met / len(outcomes) if outcomes else None,
        goodput_per_s=met / offered_s if offered_s > 0 else 0.0,
        slo=slo,
    )


def make_report(
    tally: Tally,
    *,
    label: str,
    command: str,
    transport: str,
    seed: int,
    planned: int,
    offered_s: float,
    interrupted: bool = False,
    notes: Sequence[str] = (),
    engines: EngineTime | None = None,
) -> Report:
    """`offered_s`: length of the offered load, s; shorter if the run was interrupted."""
    outcomes = tally.outcomes
    every_gap_s = np.concatenate(
        [np.asarray(gaps, dtype=np.float32) for gaps in tally.gaps_s.values()]
    )
    samples = dict.fromkeys(
        f"{o.planned.tier}: {o.message}" for o in outcomes if o.message and not o.finished
    )
    return Report(
        label=label,
        command=command,
        transport=transport,
        tier_set=tally.tiers.name,
        seed=seed,
        planned=planned,
        offered_s=offered_s,
        rate_per_s=len(outcomes) / offered_s if offered_s > 0 else 0.0,
        interrupted=interrupted,
        lateness=spread([o.lateness_s for o in outcomes]),
        lateness_max_s=max((o.lateness_s for o in outcomes), default=0.0),
        tiers={
            name: summarise(
                [o for o in outcomes if o.planned.tier == name],
                tally.gaps_s[name],
                offered_s,
                tier.slo,
            )
            for name, tier in tally.tiers.tiers.items()
        },
        total=summarise(outcomes, every_gap_s, offered_s, None),
        notes=list(notes),
        error_samples=list(samples)[:10],
        engines=engines,
        course=course_of_tally(tally, offered_s),
        cached_fraction=_cached(outcomes),
    )


def _cached(outcomes: Sequence[Outcome]) -> float | None:
    told = [o for o in outcomes if o.cached_tokens is not None]
    if not told or not any(o.planned.pieces for o in outcomes):
        return None
    found = sum(o.cached_tokens or 0 for o in told)
    return found / sum(o.planned.prompt_tokens for o in told)


def write_report(report: Report, path: Path) -> None:
    """Raises ConfigError if the file cannot be written."""
    make_folder("--out", path.parent)
    write(path, json_of(report))


def read_report(path: Path) -> Report:
    """Raises ConfigError unless the file is a report."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"report {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no report of `slackline load --out`: {error}") from error


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def seconds(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    return (
        f"{1000 * value_s:.0f} ms"
        if value_s < 1
        else f"{value_s:.1f} s"
        if value_s < 100
        else f"{value_s:.0f} s"
    )


def zero_gap_note(medians_s: Iterable[float | None]) -> str:
    """A note for a table that shows these medians of TBT, seconds; empty if it needs none."""
    return "TBT p50 0 ms: several tokens came in one iteration" if 0.0 in [*medians_s] else ""


def engine_time(spent: EngineTime) -> str:
    """The time of the engines in words."""
    held_s = spent.exec_s + spent.idle_s + spent.late_s
    if not spent.exec_s:
        return "engines computed nothing, or do not tell"
    return (
        f"engines held work for {held_s:.1f} s: they computed {percent(spent.exec_s / held_s)} of "
        f"it, waited {percent(spent.idle_s / held_s)} for plans and were late for "
        f"{percent(spent.late_s / held_s)}; "
        f"iterations took {(spent.exec_s + spent.late_s) / spent.predicted_s:.3f} times what was "
        "planned"
    )


def promise(slo: Slo | None) -> str:
    """An SLO in words."""
    if slo is None:
        return ""
    bounds = (
        ("TTFT", slo.ttft_s),
        ("thinking TBT", slo.thinking_tbt_s),
        ("TBT", slo.tbt_s),
        ("TTLT", slo.ttlt_s),
        ("task's TTLT", slo.task_ttlt_s),
    )
    multiples = (("TTFT", slo.ttft_x), ("TBT", slo.tbt_x), ("TTLT", slo.ttlt_x))
    return ", ".join(
        [f"{name} {seconds(bound_s)}" for name, bound_s in bounds if bound_s is not None]
        + [f"{name} {times:g} x alone" for name, times in multiples if times is not None]
    )


def table(report: Report) -> Table:
    """The table of one run, a column per tier: four tiers fit a terminal of 80 columns."""
    cut = ", interrupted" if report.interrupted else ""
    rate = f"{report.rate_per_s:.2f} requests/s for {report.offered_s:.0f} s{cut}"
    title = f"{escape(report.label) or 'load'}: {rate}"
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    out.add_column("")
    tiers = [*report.tiers.values(), report.total]
    for name in report.tiers:
        out.add_column(name, justify="right", overflow="fold")
    out.add_column("all", justify="right", style="bold")

    def row(name: str, texts: Iterable[str]) -> None:
        out.add_row(name, *texts)

    row("SLO", (promise(tier.slo).replace(", ", "\n") for tier in tiers))
    row("SLO met", (percent(tier.met_fraction) for tier in tiers))
    row("goodput/s", (f"{tier.goodput_per_s:.2f}" for tier in tiers))
    out.add_section()
    for name, spreads in (
        ("TTFT", [t.ttft for t in tiers]),
        ("TBT", [t.tbt for t in tiers]),
        ("TTLT", [t.ttlt for t in tiers]),
    ):
        row(f"{name} p50", (seconds(s.p50_s) for s in spreads))
        row(f"{name} p99", (seconds(s.p99_s) for s in spreads))
    out.add_section()
    for name, count in (
        ("offered", [t.offered for t in tiers]),
        ("finished", [t.finished for t in tiers]),
        ("relegated", [t.relegated for t in tiers]),
        ("refused", [t.refused for t in tiers]),
        ("errors", [t.errors + t.cancelled for t in tiers]),
        ("unfinished", [t.unfinished for t in tiers]),
    ):
        row(name, map(str, count))
    return out


def unlike(reports: Sequence[Report]) -> str:
    """The respects in which the loads of the runs differ; empty if they were offered the same
    requests in the same way.
    """
    facts: dict[str, set[str]] = {
        "seeds": {str(r.seed) for r in reports},
        "numbers of requests": {str(r.planned) for r in reports},
        "durations": {seconds(r.offered_s) for r in reports},
        "transports": {r.transport for r in reports},
    }
    return " and ".join(
        f"{name} ({', '.join(sorted(values))})" for name, values in facts.items() if len(values) > 1
    )


def side_by_side(reports: Sequence[Report]) -> Table:
    """The table of several runs of one plan, a column each; the best of a row is bold green.

    The first block shows which run met the SLOs, the rest shows how. Raises ConfigError for runs
    over different tiers.
    """
    if len({tuple(report.tiers) for report in reports}) != 1:
        raise ConfigError("only runs over the same tiers can be put side by side")
    out = Table(
        title="Different requests, served by"
        if unlike(reports)
        else "The same requests, served by",
        title_justify="left",
    )
    out.add_column("")
    for report in reports:
        out.add_column(escape(report.label) or "load", justify="right")

    def row(name: str, texts: list[str], values: list[float | None], better: int) -> None:
        """`better`: 1 the highest is best, -1 the lowest, 0 neither."""
        known = [better * value for value in values if value is not None]
        best = max(known) if better and len(set(known)) > 1 else None
        out.add_row(
            name,
            *(
                f"[bold green]{text}[/]"
                if best is not None and value is not None and better * value == best
                else text
                for text, value in zip(texts, values, strict=True)
            ),
        )

    def fractions(name: str, tiers: list[TierReport]) -> None:
        row(name, [percent(t.met_fraction) for t in tiers], [t.met_fraction for t in tiers], 1)

    totals = [report.total for report in reports]
    fractions("SLO met, all requests", totals)
    for name in reports[0].tiers:
        tiers = [report.tiers[name] for report in reports]
        fractions(f"  {name} ({promise(tiers[0].slo)})", tiers)
    if any(t.important_offered for t in totals):
        kept = [
            t.important_met / t.important_offered if t.important_offered else None for t in totals
        ]
        row("  important callers", [percent(fraction) for fraction in kept], kept, 1)
    row(
        "goodput, requests/s",
        [f"{t.goodput_per_s:.2f}" for t in totals],
        [t.goodput_per_s for t in totals],
        1,
    )
    out.add_section()
    for name in reports[0].tiers:
        tiers = [report.tiers[name] for report in reports]
        slo = tiers[0].slo or Slo()
        shown = (
            [("TTFT", [t.ttft for t in tiers]), ("TBT", [t.tbt for t in tiers])]
            if slo.interactive
            else [("TTLT", [t.ttlt for t in tiers])]
        )
        for measure, spreads in shown:
            values = [s.p99_s for s in spreads]
            row(
                f"{name}: {measure} p50 / p99",
                [f"{seconds(s.p50_s)} / {seconds(s.p99_s)}" for s in spreads],
                values,
                -1,
            )
    out.add_section()
    row("offered", [str(t.offered) for t in totals], [None] * len(totals), 0)
    row("finished", [str(t.finished) for t in totals], [float(t.finished) for t in totals], 1)
    row("relegated to best effort", [str(t.relegated) for t in totals], [None] * len(totals), 0)
    failed = [t.refused + t.errors + t.cancelled + t.unfinished for t in totals]
    row("refused, failed or unfinished", [str(n) for n in failed], [float(n) for n in failed], -1)
    return out
