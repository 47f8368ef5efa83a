"""Advises on a trace: how many replicas of which GPU, if drafts pay, which requests suffer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct

from loadgen.advise.late_minutes import Minutes, by_minute
from loadgen.advise.replica_search import Count, Fleet, Probe, Search, probed, serve
from loadgen.advise.window import Window, busiest, busiest_of, thinned
from loadgen.bound.limit import alone
from loadgen.load.mix import PlannedRequest
from loadgen.trials.figures import Figures
from loadgen.trials.parallel import run_all
from loadgen.trials.remaining import Remaining
from loadgen.trials.trial import Trial
from shared.perf import profile_file as profiles

# The length of the window with which replicas are counted.
SEARCHED_S = 120.0
SAMPLE = 2000  # requests that are looked at one by one
SHOWN = 4000  # requests that the chosen fleet serves, at most


class Hopeless(Struct, frozen=True, kw_only=True):
    """Requests of one tier that miss their SLO with a replica to themselves, without a draft."""

    profile: str
    tier: str
    offered: int
    hopeless: int


class Counted(Struct, frozen=True, kw_only=True):
    """Some requests of the trace in a row."""

    requests: int
    from_s: float  # of the trace
    seconds: float


class Shown(Struct, frozen=True, kw_only=True):
    """A longer window, as the chosen fleet serves it."""

    stretch: Counted  # the window
    figures: Figures
    minutes: Minutes
    one_fewer: Count | None  # replica; None where one is enough


class Advice(Struct, frozen=True, kw_only=True):
    """The output of `slackline advise --json`."""

    trace: str
    tiers: str
    definition: str
    seed: int
    requests: int
    duration_s: float
    target: float
    searched: Counted  # the window for which the replicas are enough
    fleets: list[Fleet]
    hopeless: list[Hopeless]  # of a sample of the window that was searched
    chosen: Fleet | None  # None where no fleet is enough
    shown: Shown | None


def advise(
    trials: Sequence[Trial],
    requests: Sequence[PlannedRequest],
    target: float,
    jobs: int,
    show: Callable[[str], None],
) -> Advice:
    """Advice on these requests. Each trial is a kind of fleet: a profile, with or without a draft
    model. `show` receives a line about what has been done.
    """
    one = trials[0]
    profile = profiles.load(one.deployment.profile)
    searched = busiest(requests, one.duration_s, profile, SEARCHED_S)
    sample = thinned(searched, min(1.0, SAMPLE / len(searched.requests)))
    hopeless = {trial.deployment.profile: _hopeless(trial, sample) for trial in trials}
    violations = {name: 1.0 - target + _share(found, sample) for name, found in hopeless.items()}
    show(f"counting replicas for {len(searched.requests)} requests")
    fleets = _fleets(trials, searched, violations, len(requests) / one.duration_s, jobs, show)
    chosen = choose(fleets)
    shown = None
    if chosen is not None:
        window = busiest_of(requests, one.duration_s, profile, SHOWN)
        shown = _shown(trials[fleets.index(chosen)], window, chosen, jobs, show)
    return Advice(
        trace=one.workload,
        tiers=one.tiers.name,
        definition=one.tiers.definition,
        seed=one.seed,
        requests=len(requests),
        duration_s=one.duration_s,
        target=target,
        searched=_counted(searched),
        fleets=fleets,
        hopeless=[each for found in hopeless.values() for each in found],
        chosen=chosen,
        shown=shown,
    )


def _fleets(
    trials: Sequence[Trial],
    window: Window,
    violations: Mapping[str, float],
    mean_rps: float,
    jobs: int,
    show: Callable[[str], None],
) -> list[Fleet]:
    """[trials] the fleet with the fewest replicas for each trial. `violations`: by profile. With a
    draft model the search begins at the number that is enough without one.
    """
    searches: dict[int, Search] = {}
    runs: list[tuple[int, Probe]] = []  # along the tasks
    tasks: list[Callable[[], float]] = []

    def go_on(n: int) -> None:
        for probe in searches[n].step():
            runs.append((n, probe))
            tasks.append(partial(probed, trials[n], window, probe))

    def begin(n: int, near: int | None) -> None:
        limit = violations[trials[n].deployment.profile]
        searches[n] = Search(trials[n], window, limit, mean_rps, near)
        go_on(n)

    with_draft = [n for n, trial in enumerate(trials) if trial.deployment.draft != 0.0]
    for n in [n for n in range(len(trials)) if n not in with_draft] or with_draft:
        begin(n, None)
    found: dict[int, Fleet] = {}
    remaining = Remaining(len(trials))
    for index, fraction in run_all(tasks, jobs):
        n, probe = runs[index]
        searches[n].ended(probe, fraction)
        go_on(n)
        if not searches[n].over:
            continue
        found[n] = fleet = searches[n].fleet()
        show(f"{remaining.one_done()} {title(fleet)}: {said(fleet)}")
        for other in with_draft:
            if other not in searches and trials[other].deployment.profile == fleet.profile:
                begin(other, fleet.replicas)
    return [found[n] for n in range(len(trials))]


def choose(fleets: Sequence[Fleet]) -> Fleet | None:
    """The fleet with the fewest GPUs; of two alike the one without a draft model."""
    known = [fleet for fleet in fleets if fleet.gpus is not None]
    return min(known, key=lambda fleet: (fleet.gpus, fleet.draft), default=None)


def title(fleet: Fleet) -> str:
    return fleet.profile + (" with a draft model" if fleet.draft else "")


def said(fleet: Fleet) -> str:
    """The number of replicas, in words."""
    if fleet.replicas is not None:
        return replicas_in_words(fleet.replicas)
    best = max(fleet.counts, key=lambda tried: tried.attainment)
    return f"not enough with {replicas_in_words(best.replicas)}: {100 * best.attainment:.1f} % met"


def replicas_in_words(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _shown(
    trial: Trial, window: Window, chosen: Fleet, jobs: int, show: Callable[[str], None]
) -> Shown:
    """The chosen fleet, and one replica fewer, on this window."""
    assert chosen.replicas is not None
    counts = [chosen.replicas, *([chosen.replicas - 1] if chosen.replicas > 1 else [])]
    words = " and with ".join(map(replicas_in_words, counts))
    show(f"serving {len(window.requests)} requests with {words}")
    tasks = [partial(serve, trial, window, n, keep_times=True) for n in counts]
    served = dict(run_all(tasks, jobs))
    fewer = None
    if len(counts) > 1:
        fewer = Count(replicas=counts[1], attainment=1.0 - served[1].figures.violated_fraction)
    return Shown(
        stretch=_counted(window),
        figures=served[0].figures,
        minutes=by_minute(window, served[0].verdicts),
        one_fewer=fewer,
    )


def _hopeless(trial: Trial, window: Window) -> list[Hopeless]:
    found = []
    for name in trial.tiers.tiers:
        theirs = [request for request in window.requests if request.tier == name]
        lost = len(theirs)
        if theirs:
            lost -= alone(theirs, trial.tiers, trial.deployment.profile)
        if lost:
            found.append(
                Hopeless(
                    profile=trial.deployment.profile, tier=name, offered=len(theirs), hopeless=lost
                )
            )
    return found


def _share(hopeless: Sequence[Hopeless], sample: Window) -> float:
    return sum(each.hopeless for each in hopeless) / len(sample.requests)


def _counted(window: Window) -> Counted:
    return Counted(requests=len(window.requests), from_s=window.from_s, seconds=window.seconds)
