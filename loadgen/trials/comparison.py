"""Several policies on identical arrivals, at one rate or more, each rate with the limit that no
scheduler can beat.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.bound.limit import Bound, bound
from loadgen.load.mix import PlannedRequest
from loadgen.load.report import percent
from loadgen.load.run_course import Course, course_of
from loadgen.load.tally import GOOD_ENDS
from loadgen.simulator.simulation import SimulationResult
from loadgen.trials.figures import Figures, figures_of, token_gaps_s
from loadgen.trials.figures_table import named
from loadgen.trials.parallel import run_all
from loadgen.trials.trial import Trial
from shared.errors import ConfigError
from shared.schemas import Verdict
from shared.vocabulary import Slo

Seconds = NDArray[np.float32]


class Comparison(Struct, frozen=True, kw_only=True):
    """Policies at one rate. `requests`: the number offered to each policy, the same ones."""

    rate_rps: float
    requests: int
    bound: Bound
    policies: list[Figures]


class Latencies(NamedTuple):
    """The latencies of one tier: every TTFT of the requests that have a first token, and every TTLT
    of those that finished; ascending.

    `plane`: [requests, 2] TTFT and mean TPOT, each over its bound, in order of arrival, for the
    requests that finished and have both bounds.
    """

    ttft_s: Seconds
    ttlt_s: Seconds
    plane: Seconds


class Offered(NamedTuple):
    """The load of one rate, served by each of `trials`."""

    rate_rps: float
    requests: Sequence[PlannedRequest]
    trials: Sequence[Trial]


class Served(NamedTuple):
    figures: Figures
    latencies: dict[str, Latencies]  # by tier; empty unless wanted
    course: Course | None  # None unless latencies are wanted


class Round(NamedTuple):
    """The results of one rate. `latencies` and `courses`: of each policy; empty or None unless
    wanted.
    """

    comparison: Comparison
    latencies: list[dict[str, Latencies]]
    courses: list[Course | None]


class Contestant(NamedTuple):
    policy: str
    settings: dict[str, str]


def parse_policies(text: str) -> list[Contestant]:
    """Parse `NAME[:KEY=VALUE[+KEY=VALUE...]],...`. The same name may come again with other
    settings. Raises ConfigError.
    """
    found: list[Contestant] = []
    for word in text.split(","):
        policy, colon, pairs = word.strip().partition(":")
        if not policy:
            raise ConfigError(
                "--policies: expected NAME[:KEY=VALUE[+KEY=VALUE...]],..., and one of the names "
                "is empty"
            )
        settings: dict[str, str] = {}
        for pair in pairs.split("+") if colon else []:
            key, equals, value = pair.partition("=")
            if not key or not equals or key in settings:
                raise ConfigError(
                    f"--policies `{word.strip()}`: expected each KEY=VALUE once after the colon, "
                    f"joined by +"
                )
            settings[key] = value
        if Contestant(policy, settings) in found:
            raise ConfigError(f"--policies: `{word.strip()}` is there twice")
        found.append(Contestant(policy, settings))
    return found


def compare(
    offered: Sequence[Offered], jobs: int, *, latencies: bool, show: Callable[[str], None]
) -> list[Round]:
    """One round per rate. `show` receives a line on what runs, then one on each run that ended."""
    tasks: list[Callable[[], Bound | Served]] = []
    # of each task: the index of its rate, and of its policy or -1 for the bound
    places: list[tuple[int, int]] = []
    for at, (_, requests, trials) in enumerate(offered):
        one = trials[0]
        by = one.deployment
        tasks.append(partial(bound, requests, one.tiers, by.profile, by.replicas))
        tasks += [partial(serve, trial, requests, latencies) for trial in trials]
        places += [(at, n) for n in range(-1, len(trials))]
    rates = ", ".join(f"{rate_rps:g}" for rate_rps, _, _ in offered)
    policies = [named(t.deployment.policy, t.deployment.settings) for t in offered[0].trials]
    show(f"{len(tasks)} runs: {', '.join(['bound', *policies])} at {rates} requests/s")
    bounds, served = dict[int, Bound](), dict[tuple[int, int], Served]()
    for number, made in run_all(tasks, jobs):
        at, n = places[number]
        if isinstance(made, Bound):
            bounds[at] = made
            show(_line(offered[at], "bound", made))
        else:
            served[at, n], found = made, made.figures
            show(_line(offered[at], named(found.policy, found.settings), found))
    rounds = []
    for at, (rate_rps, requests, trials) in enumerate(offered):
        row = [served[at, n] for n in range(len(trials))]
        found_all = Comparison(
            rate_rps=rate_rps,
            requests=len(requests),
            bound=bounds[at],
            policies=[one.figures for one in row],
        )
        rounds.append(Round(found_all, [one.latencies for one in row], [one.course for one in row]))
    return rounds


def _line(offered: Offered, name: str, found: Bound | Figures) -> str:
    violated = percent(found.violated_fraction)
    return f"{offered.rate_rps:g} requests/s: {name} {violated} violated ({found.wall_s:.1f} s)"


def serve(trial: Trial, requests: Sequence[PlannedRequest], latencies: bool) -> Served:
    """Run one trial, in a process of its own or in this one. Only the figures and latencies of the
    run are kept.
    """
    result = trial.serve(requests)
    figures = figures_of(trial, requests, result)
    if not latencies:
        return Served(figures, {}, None)
    found = by_tier(requests, result)
    return Served(figures, found, _course(requests, result, found, trial.duration_s))


def _course(
    requests: Sequence[PlannedRequest],
    result: SimulationResult,
    found: dict[str, Latencies],
    duration_s: float,
) -> Course:
    tiers = [request.tier for request in requests]
    gaps_s, each = np.empty(0, np.float32), np.zeros(len(requests), np.int64)
    if result.token_unix_s is not None:
        gaps_s, each = token_gaps_s(result.token_unix_s)
    of_tier = np.repeat(np.array(tiers), each)
    return course_of(
        tiers,
        [request.arrival_s for request in requests],
        [v is not None and v.slo_met for v in result.verdicts],
        {
            tier: {
                "TTFT": one.ttft_s.astype(np.float64),
                "TBT": gaps_s[of_tier == tier].astype(np.float64),
                "TTLT": one.ttlt_s.astype(np.float64),
            }
            for tier, one in found.items()
        },
        duration_s,
    )


def by_tier(requests: Sequence[PlannedRequest], result: SimulationResult) -> dict[str, Latencies]:
    found = {}
    for tier in dict.fromkeys(request.tier for request in requests):
        each = zip(requests, result.verdicts, result.slos, strict=True)
        ended = [(v, slo) for request, v, slo in each if v is not None and request.tier == tier]
        of = [v for v, _ in ended]
        ttft_s = np.array([v.ttft_s for v in of if v.ttft_s is not None], dtype=np.float32)
        ttlt_s = np.array(
            [v.ttlt_s for v in of if v.ttlt_s is not None and v.finish_reason in GOOD_ENDS],
            dtype=np.float32,
        )
        plane = [both for both in (on_the_plane(v, slo) for v, slo in ended) if both is not None]
        found[tier] = Latencies(
            np.sort(ttft_s), np.sort(ttlt_s), np.array(plane, dtype=np.float32).reshape(-1, 2)
        )
    return found


def on_the_plane(v: Verdict, slo: Slo) -> tuple[float, float] | None:
    """TTFT and mean TPOT, each over its bound; None where one of them is missing."""
    if (
        v.finish_reason not in GOOD_ENDS
        or v.ttft_s is None
        or v.mean_tpot_s is None
        or slo.ttft_s is None
        or slo.tbt_s is None
    ):
        return None
    return v.ttft_s / slo.ttft_s, v.mean_tpot_s / slo.tbt_s
