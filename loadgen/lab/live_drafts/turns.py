"""The turns of the policies: their order, and those of each as one row, with shares and times in
the mean and counts together.

A machine has better and worse minutes. Where the policies take turns, each has some of both.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.live_drafts.rising_load import RisingLoad
from loadgen.lab.live_drafts.trial_run import Attained, Row
from loadgen.lab.live_drafts.worth import Band, Phases
from loadgen.trials.comparison import Contestant
from shared.perf.draft import fractions_of


class Turns(NamedTuple):
    """The turns of one policy."""

    row: Row  # of all of them
    each: Sequence[Row]

    def span(self, value: Callable[[Row], float]) -> tuple[float, float]:
        """The least and the most of any turn."""
        values = [value(row) for row in self.each]
        return min(values), max(values)


def in_turns(
    loads: Sequence[RisingLoad], contestants: Sequence[Contestant]
) -> list[tuple[RisingLoad, Contestant]]:
    """All policies with each load, in the order in which they are served. Each turn begins with
    another policy: a machine may be slower at the end of every one.
    """
    order = []
    for n, load in enumerate(loads):
        first = n * len(contestants) // len(loads)
        turn = [*contestants[first:], *contestants[:first]]
        order += [(load, contestant) for contestant in turn]
    return order


def by_policy(rows: Sequence[Row]) -> list[Turns]:
    """The turns of each policy, in the order of the first ones."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    return [Turns(_together(each), each) for each in found.values()]


def _together(rows: Sequence[Row]) -> Row:
    first = rows[0]
    costs = [fractions_of(row.cost) for row in rows]
    steps, reads = zip(*costs, strict=True)
    return replace(
        first,
        requests=sum(row.requests for row in rows),
        live=_attained([row.live for row in rows]),
        simulated=_attained([row.simulated for row in rows]),
        verifying=_phases([row.verifying for row in rows]),
        plain=_phases([row.plain for row in rows]),
        bands=[
            Band(
                least=bands[0].least,
                most=bands[0].most,
                plain=_phases([band.plain for band in bands]),
                drafting=_phases([band.drafting for band in bands]),
            )
            for bands in zip(*(row.bands for row in rows), strict=True)
        ],
        cost=(fmean(steps), fmean(reads)),
        acceptance=fmean(row.acceptance for row in rows),
        times=fmean(row.times for row in rows),
        late_s=max(row.late_s for row in rows),
    )


def _attained(turns: Sequence[Attained]) -> Attained:
    yields = [one.tokens_per_verification for one in turns]
    known = [tokens for tokens in yields if tokens is not None]
    return Attained(
        met=fmean(one.met for one in turns),
        by_tier={tier: fmean(one.by_tier[tier] for one in turns) for tier in turns[0].by_tier},
        by_stage=[fmean(stage) for stage in zip(*(one.by_stage for one in turns), strict=True)],
        goodput_tokens_per_s=fmean(one.goodput_tokens_per_s for one in turns),
        tokens_per_verification=fmean(known) if known else None,
    )


def _phases(turns: Sequence[Phases]) -> Phases:
    iterations = sum(one.iterations for one in turns)
    decodes = sum(one.iterations * one.decodes for one in turns)
    if not decodes:
        return Phases()

    def mean(value: Callable[[Phases], float]) -> float:
        return sum(one.iterations * value(one) for one in turns) / iterations

    return Phases(
        iterations=iterations,
        decodes=decodes / iterations,
        draft_s=mean(lambda one: one.draft_s),
        pass_s=mean(lambda one: one.pass_s),
        rest_s=mean(lambda one: one.rest_s),
        tokens=sum(one.iterations * one.decodes * one.tokens for one in turns) / decodes,
    )
