"""Writes an advice as the text that `slackline advise` prints."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadgen.advise.advice import Advice, Shown, replicas_in_words, said, title
from loadgen.advise.replica_search import Fleet
from loadgen.load.report import percent
from loadgen.tables import print_line, print_table, with_columns
from loadgen.trials.figures_table import figures_table
from shared.rules.tiers import TierSet


def print_advice(advice: Advice, tiers: TierSet, out: Console) -> None:
    searched = advice.searched
    print_line(
        out,
        f"{advice.trace}: {_requests(advice.requests)} in {_length(advice.duration_s)}; tiers "
        f"{advice.tiers}, seed {advice.seed}; SLOs judged by {advice.definition}",
    )
    print_line(
        out,
        f"Replicas that meet {percent(advice.target)} of the SLOs in the busiest stretch: "
        f"{_requests(searched.requests)} in {_length(searched.seconds)}, "
        f"{_length(searched.from_s)} after the beginning",
    )
    print_table(out, _fleets_table(advice.fleets))
    for line in (*_hopeless(advice), *_gpus(advice.fleets), *_drafts(advice.fleets)):
        print_line(out, line)
    if advice.chosen is None or advice.shown is None:
        print_line(out, "No fleet is enough: loosen the SLOs, or lower --target.")
        return
    shown = advice.shown
    print_line(
        out,
        f"\n{_requests(shown.stretch.requests)} in {_length(shown.stretch.seconds)}, "
        f"on {said(advice.chosen)} of {title(advice.chosen)}:",
    )
    print_table(out, figures_table(shown.figures, tiers))
    for line in _sufferers(shown):
        print_line(out, line)


def _fleets_table(fleets: Sequence[Fleet]) -> Table:
    heads = "profile|draft model|>replicas|>GPUs|>SLO met|>with one fewer"
    table = with_columns(Table(box=SIMPLE_HEAD), heads)
    for fleet in fleets:
        met = {count.replicas: percent(count.attainment) for count in fleet.counts}
        draft = "yes" if fleet.draft else "no"
        if fleet.replicas is None:
            most = max(met)
            table.add_row(fleet.profile, draft, f"over {most}", "", met[most], "")
        else:
            fewer = met.get(fleet.replicas - 1, "")
            # where the mean load needs more than the stretch does, so many were not tried
            best = met.get(fleet.replicas, f"over {met[max(met)]}")
            known = (str(fleet.replicas), str(fleet.gpus), best, fewer)
            table.add_row(fleet.profile, draft, *known)
    return table


def _hopeless(advice: Advice) -> Iterator[str]:
    for each in advice.hopeless:
        yield (
            f"{each.hopeless} of {each.offered} requests of tier {each.tier} miss their SLO even "
            f"with a replica of {each.profile} to themselves, without a draft model. The target "
            "does not count them: give them a looser SLO."
        )


def _gpus(fleets: Sequence[Fleet]) -> Iterator[str]:
    """The price at which a GPU pays, beside the kind that needs most."""
    gpus = {f.profile: f.gpus for f in fleets if not f.draft and f.gpus is not None}
    most = max(gpus, key=gpus.__getitem__, default="")
    for profile, count in gpus.items():
        if profile == most:
            continue
        if count == gpus[most]:
            each = f"{count} GPU" if count == 1 else f"{count} GPUs"
            yield f"{most} and {profile} need {each} each: the cheaper one is enough."
        else:
            yield (
                f"A GPU of {profile} pays where it costs less than {gpus[most] / count:.2g} times "
                f"one of {most}."
            )


def _drafts(fleets: Sequence[Fleet]) -> Iterator[str]:
    plain = {fleet.profile: fleet.replicas for fleet in fleets if not fleet.draft}
    for fleet in fleets:
        if not fleet.draft or fleet.replicas is None or fleet.profile not in plain:
            continue
        without = plain[fleet.profile]
        if without is None:
            gain = "reaches the target, which no number of replicas reaches without it"
        elif fleet.replicas < without:
            gain = f"saves {without - fleet.replicas} of {replicas_in_words(without)}"
        else:
            gain = "saves no replica"
        yield f"A draft model for {fleet.profile} {gain}."


def _sufferers(shown: Shown) -> Iterator[str]:
    figures, fewer, minutes = shown.figures, shown.one_fewer, shown.minutes
    if fewer is not None:
        violated = percent(1.0 - fewer.attainment)
        yield f"With {replicas_in_words(fewer.replicas)} {violated} of them are violated."
    if minutes.busy_share is not None:
        were = "was" if figures.relegated == 1 else "were"
        yield (
            f"{_requests(figures.relegated)} {were} best-effort at some time. "
            f"{percent(minutes.busy_share)} of the violated ones came in the tenth of the minutes "
            "with the most prompt tokens."
        )


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _length(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
