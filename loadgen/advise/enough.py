"""The fewest replicas of a kind that keep enough SLOs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loadgen.advise.stretch import Stretch, thinned, work_s
from loadgen.lab.figures import Figures, figures_of
from loadgen.lab.trial import Trial
from shared.perf import profile_file as profiles
from shared.schemas import Verdict

MOST_REPLICAS = 512
GROWTH = 1.5  # while no number is enough
# The number that the work alone would fill for so much of the time is tried first.
FILLED = 0.8
# A load of more requests is heavy: SOME replicas serve a share of it, that grows or falls in steps.
WHOLE, SOME, STEP = 3000, 2, 1.1


class Count(Struct, frozen=True, kw_only=True):
    """One number of replicas that was tried."""

    replicas: int
    attainment: float  # the fraction of requests whose SLO was met


class Fleet(Struct, frozen=True, kw_only=True):
    """Replicas of one profile, with or without a draft model. `replicas` is the fewest that are
    enough; None where no number is. `counts` are ascending.
    """

    profile: str
    gpu: str
    gpus_each: int  # of a replica
    draft: bool
    replicas: int | None
    counts: list[Count]

    @property
    def gpus(self) -> int | None:
        return None if self.replicas is None else self.replicas * self.gpus_each


class Served(NamedTuple):
    figures: Figures
    verdicts: Sequence[Verdict | None]  # along the requests


def serve(trial: Trial, stretch: Stretch, replicas: int, *, keep_times: bool = False) -> Served:
    """This stretch on so many replicas. Figures of TBT come only with `keep_times`."""
    deployment = dataclasses.replace(trial.deployment, replicas=replicas)
    one = replace(trial, deployment=deployment, duration_s=stretch.seconds)
    result = one.serve(stretch.requests, keep_times=keep_times)
    return Served(figures_of(one, stretch.requests, result), result.verdicts)


def count(
    trial: Trial, stretch: Stretch, violations: float, mean_rps: float, near: int | None = None
) -> Fleet:
    """The fewest replicas with which at most the fraction `violations` of the stretch miss their
    SLO, and that keep up with the mean load: what may wait must be done some time. Where the load
    is heavy, a few replicas serve a share of it, and the number is in proportion.

    mean_rps: requests a second of the whole trace.
    near: the number of replicas to try first.
    """
    replicas = filled(trial, stretch)
    heavy = len(stretch.requests) > WHOLE and replicas > SOME
    try_all = in_proportion if heavy else one_by_one
    met = try_all(trial, stretch, violations, replicas if near is None else float(near))
    best = min((n for n, well in enough(met, violations).items() if well), default=None)
    if best is not None:
        stretch_rps = len(stretch.requests) / stretch.seconds
        best = max(best, math.ceil(FILLED * replicas * mean_rps / stretch_rps))
    file = profiles.read(trial.deployment.profile)
    return Fleet(
        profile=trial.deployment.profile,
        gpu=file.gpu,
        gpus_each=file.tensor_parallel,
        draft=trial.deployment.draft != 0.0,
        replicas=best,
        counts=[Count(replicas=n, attainment=met[n]) for n in sorted(met)],
    )


def filled(trial: Trial, stretch: Stretch) -> float:
    """The number of replicas that the work of the stretch fills for FILLED of the time."""
    profile = profiles.load(trial.deployment.profile)
    return sum(work_s(stretch.requests, profile)) / stretch.seconds / FILLED


def in_proportion(
    trial: Trial, stretch: Stretch, violations: float, filled: float
) -> dict[int, float]:
    """The fraction met with each number of replicas that was tried: SOME of them, on a share of the
    load in proportion.
    """
    met: dict[int, float] = {}
    well: dict[float, bool] = {}
    while (share := next_share(well, SOME / filled)) is not None:
        fraction = 1.0 - serve(trial, thinned(stretch, share), SOME).figures.violated_fraction
        well[share] = enough({SOME: fraction}, violations)[SOME]
        replicas = math.ceil(SOME / share)
        met[replicas] = max(fraction, met.get(replicas, 0.0))
    return met


def one_by_one(
    trial: Trial, stretch: Stretch, violations: float, filled: float
) -> dict[int, float]:
    """The fraction met with each number of replicas that was tried; one fewer than enough is."""
    met: dict[int, float] = {}
    first = max(1, round(filled))
    while (replicas := next_count(enough(met, violations), first)) is not None:
        met[replicas] = 1.0 - serve(trial, stretch, replicas).figures.violated_fraction
    return met


def enough(met: Mapping[int, float], violations: float) -> dict[int, bool]:
    """For each number of replicas that was tried, whether it is enough."""
    return {count: 1.0 - fraction <= violations + 1e-9 for count, fraction in met.items()}


def next_share(known: Mapping[float, bool], first: float) -> float | None:
    """The share of the load to try next, given which were little enough; None when the largest is
    found, to a step, or the number of replicas would be out of range.
    """
    little = max((share for share, passed in known.items() if passed), default=None)
    much = min((share for share, passed in known.items() if not passed), default=None)
    if little is None:
        share = min(first, 1.0) if much is None else much / STEP
        return share if share >= SOME / MOST_REPLICAS else None
    if much is not None:
        return None
    return min(little * STEP, 1.0) if little < 1.0 else None


def next_count(known: Mapping[int, bool], first: int) -> int | None:
    """The number of replicas to try next, given which were enough; None when the fewest is found,
    or where more make no difference. More replicas are taken to be no worse.
    """
    if not known:
        return min(first, MOST_REPLICAS)
    well = [count for count, passed in known.items() if passed]
    short = max((count for count, passed in known.items() if not passed), default=0)
    if not well:
        more = min(math.ceil(GROWTH * short), MOST_REPLICAS)
        return more if more > short else None
    fewest = min(well)
    if fewest - short <= 1:
        return None
    if short:
        return (fewest + short) // 2
    # the first number is likely to be near
    return fewest - 1 if len(known) == 1 else max(math.floor(fewest / GROWTH), 1)
