"""Searches for the fewest replicas of one kind that meet enough SLOs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loadgen.advise.window import Window, thinned, work_s
from loadgen.trials.figures import Figures, figures_of
from loadgen.trials.trial import Trial
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


def serve(trial: Trial, window: Window, replicas: int, *, keep_times: bool = False) -> Served:
    """Serve this window with `replicas`. Figures of TBT come only with `keep_times`."""
    deployment = dataclasses.replace(trial.deployment, replicas=replicas)
    one = replace(trial, deployment=deployment, duration_s=window.seconds)
    result = one.serve(window.requests, keep_times=keep_times)
    return Served(figures_of(one, window.requests, result), result.verdicts)


class Probe(NamedTuple):
    """One run of a search: some number of replicas serves a share of the window."""

    replicas: int
    share: float = 1.0


def probed(trial: Trial, window: Window, probe: Probe) -> float:
    """Make a run of a search. Returns the fraction of its requests whose SLO is met."""
    served = window if probe.share == 1.0 else thinned(window, probe.share)
    return 1.0 - serve(trial, served, probe.replicas).figures.violated_fraction


class Search:
    """The search for the fewest replicas of one kind with which at most the fraction `violations`
    of the window miss their SLO, and that keep up with the mean load: work that may wait must be
    done some time. Where the load is heavy, a few replicas serve a share of it, and the number is
    in proportion.

    The caller makes the runs, those of one step at once if it likes. Which runs are made depends
    only on their results.
    """

    def __init__(
        self,
        trial: Trial,
        window: Window,
        violations: float,
        mean_rps: float,
        near: int | None = None,
    ) -> None:
        """mean_rps: requests a second of the whole trace.
        near: the number of replicas to try first, and that is likely to be the fewest: one fewer is
            tried at once with it.
        """
        self._trial, self._window = trial, window
        self._violations, self._mean_rps, self._near = violations, mean_rps, near
        self._filled = filled(trial, window)
        self._heavy = len(window.requests) > WHOLE and self._filled > SOME
        self._first = self._filled if near is None else float(near)
        self._met: dict[int, float] = {}  # with each number of replicas
        self._well: dict[float, bool] = {}  # each share, where the load is heavy
        self._tried: dict[Probe, float | None] = {}  # the fraction met; None: under way
        self.over = False  # nothing is left to try

    def step(self) -> list[Probe]:
        """The runs to make now; none while some are under way, or at the end."""
        if None in self._tried.values():
            return []
        probes = self._next()
        if self._near is not None and probes and not self._tried:
            probes.append(self._beyond(probes[0]))
        fresh = [probe for probe in dict.fromkeys(probes) if probe not in self._tried]
        self.over = not fresh
        self._tried.update(dict.fromkeys(fresh))
        return fresh

    def ended(self, probe: Probe, fraction: float) -> None:
        """A run has ended: `fraction` of its requests met their SLO."""
        self._tried[probe] = fraction
        well = enough({probe.replicas: fraction}, self._violations)[probe.replicas]
        replicas = probe.replicas
        if self._heavy:
            self._well[probe.share] = well
            replicas = math.ceil(probe.replicas / probe.share)
        self._met[replicas] = max(fraction, self._met.get(replicas, 0.0))

    def fleet(self) -> Fleet:
        """The fleet that was found."""
        met = self._met
        best = min((n for n, well in enough(met, self._violations).items() if well), default=None)
        if best is not None:
            window_rps = len(self._window.requests) / self._window.seconds
            keeps_up = math.ceil(FILLED * self._filled * self._mean_rps / window_rps)
            best = max(best, keeps_up)
        deployment = self._trial.deployment
        file = profiles.read(deployment.profile)
        return Fleet(
            profile=deployment.profile,
            gpu=file.gpu,
            gpus_each=file.tensor_parallel,
            draft=deployment.draft != 0.0,
            replicas=best,
            counts=[Count(replicas=n, attainment=met[n]) for n in sorted(met)],
        )

    def _next(self) -> list[Probe]:
        if self._heavy:
            share = next_share(self._well, SOME / self._first)
            return [] if share is None else [Probe(SOME, share)]
        replicas = next_count(enough(self._met, self._violations), max(1, round(self._first)))
        return [] if replicas is None else [Probe(replicas)]

    def _beyond(self, probe: Probe) -> Probe:
        """The run after this one, if this is found to be enough."""
        if self._heavy:
            return Probe(SOME, min(probe.share * STEP, 1.0))
        return Probe(max(probe.replicas - 1, 1))


def filled(trial: Trial, window: Window) -> float:
    """The number of replicas that the work of the window fills for FILLED of the time."""
    profile = profiles.load(trial.deployment.profile)
    return sum(work_s(window.requests, profile)) / window.seconds / FILLED


def enough(met: Mapping[int, float], violations: float) -> dict[int, bool]:
    """For each number of replicas that was tried, whether it is enough."""
    return {count: 1.0 - fraction <= violations + 1e-9 for count, fraction in met.items()}


def next_share(known: Mapping[float, bool], first: float) -> float | None:
    """The share of the load to try next, given which shares passed; None when the largest is found,
    to a step, or the number of replicas would be out of range.
    """
    little = max((share for share, passed in known.items() if passed), default=None)
    much = min((share for share, passed in known.items() if not passed), default=None)
    if little is None:
        least = SOME / MOST_REPLICAS
        share = max(min(first, 1.0), least) if much is None else much / STEP
        return share if share >= least else None
    if much is not None:
        return None
    return min(little * STEP, 1.0) if little < 1.0 else None


def next_count(known: Mapping[int, bool], first: int) -> int | None:
    """The number of replicas to try next, given which numbers were enough; None when the fewest is
    found, or where more make no difference. More replicas are taken to be no worse.
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
