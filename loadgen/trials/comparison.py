"""Compares policies on identical arrivals, at one rate or more, beside the bound of each rate."""

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
from loadgen.simulator.simulation import SimulationResult
from loadgen.trials.figures import Figures, figures_of, token_gaps_s
from loadgen.trials.figures_table import named
from loadgen.trials.parallel import run_all
from loadgen.trials.remaining import Remaining
from loadgen.trials.trial import Trial
from shared.core.record.verdict import GOOD_ENDS
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


class Offered(NamedTuple):
    """The load of one rate, served by each of `trials`."""

    rate_rps: float
    requests: Sequence[PlannedRequest]
    trials: Sequence[Trial]


class Served(NamedTuple):
    """One policy at one rate. `planes` and `course` are empty and None unless latencies are wanted.
    The plane of a tier: [requests, 2] TTFT and mean TPOT, each over its bound, in order of arrival,
    for the requests that finished and have both bounds.
    """

    figures: Figures
    planes: dict[str, Seconds]
    course: Course | None


class Round(NamedTuple):
    """The results of one rate: the comparison, and the planes and the course of each policy."""

    comparison: Comparison
    planes: list[dict[str, Seconds]]
    courses: list[Course | None]


class Contestant(NamedTuple):
    policy: str
    settings: dict[str, str]


def parse_policies(text: str) -> list[Contestant]:
    """`NAME[:KEY=VALUE[+KEY=VALUE...]],...`; names may repeat. Raises ConfigError."""
    found: list[Contestant] = []
    for word in text.split(","):
        policy, colon, pairs = word.strip().partition(":")
        if policy.endswith(".py"):  # FILE.py:CLASS
            within, colon, pairs = pairs.partition(":")
            policy += f":{within}"
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
        tasks.append(
            partial(bound, requests, one.tiers, by.profile, by.replicas, by.facts.kv_tokens)
        )
        tasks += [partial(serve, trial, requests, latencies) for trial in trials]
        places += [(at, n) for n in range(-1, len(trials))]
    rates = ", ".join(dict.fromkeys(f"{rate_rps:g}" for rate_rps, _, _ in offered))
    policies = [named(t.deployment.policy, t.deployment.settings) for t in offered[0].trials]
    show(f"{len(tasks)} runs: {', '.join(['bound', *policies])} at {rates} requests/s")
    remaining = Remaining(len(tasks))
    bounds, served = dict[int, Bound](), dict[tuple[int, int], Served]()
    for number, made in run_all(tasks, jobs):
        at, n = places[number]
        if isinstance(made, Bound):
            bounds[at] = made
            show(f"{remaining.one_done()} {_line(offered[at], 'bound', made)}")
        else:
            served[at, n], found = made, made.figures
            line = _line(offered[at], named(found.policy, found.settings), found)
            show(f"{remaining.one_done()} {line}")
    rounds = []
    for at, (rate_rps, requests, trials) in enumerate(offered):
        row = [served[at, n] for n in range(len(trials))]
        found_all = Comparison(
            rate_rps=rate_rps,
            requests=len(requests),
            bound=bounds[at],
            policies=[one.figures for one in row],
        )
        rounds.append(Round(found_all, [one.planes for one in row], [one.course for one in row]))
    return rounds


def _line(offered: Offered, name: str, found: Bound | Figures) -> str:
    violated = percent(found.violated_fraction)
    return f"{offered.rate_rps:g} requests/s: {name} {violated} violated ({found.wall_s:.1f} s)"


def serve(trial: Trial, requests: Sequence[PlannedRequest], latencies: bool) -> Served:
    """Run one trial, in any process. Only figures and latencies are kept."""
    result = trial.serve(requests)
    figures = figures_of(trial, requests, result)
    if not latencies:
        return Served(figures, {}, None)
    return Served(figures, _planes(requests, result), _course(requests, result, trial.duration_s))


def _course(
    requests: Sequence[PlannedRequest], result: SimulationResult, duration_s: float
) -> Course:
    tiers = [request.tier for request in requests]
    gaps_s, each = np.empty(0, np.float32), np.zeros(len(requests), np.int64)
    if result.token_unix_s is not None:
        gaps_s, each = token_gaps_s(result.token_unix_s)
    of_tier = np.repeat(np.array(tiers), each)
    latencies_s = {}
    for tier in dict.fromkeys(tiers):
        both = zip(tiers, result.verdicts, strict=True)
        ended = [v for its, v in both if v is not None and its == tier]
        finished = [v for v in ended if v.finish_reason in GOOD_ENDS]
        latencies_s[tier] = {
            "TTFT": np.array([v.ttft_s for v in ended if v.ttft_s is not None]),
            "TBT": gaps_s[of_tier == tier].astype(np.float64),
            "TTLT": np.array([v.ttlt_s for v in finished if v.ttlt_s is not None]),
        }
    met = [v is not None and v.slo_met for v in result.verdicts]
    return course_of(tiers, [r.arrival_s for r in requests], met, latencies_s, duration_s)


def _planes(requests: Sequence[PlannedRequest], result: SimulationResult) -> dict[str, Seconds]:
    planes: dict[str, list[tuple[float, float]]] = {}
    for request, v, slo in zip(requests, result.verdicts, result.slos, strict=True):
        points = planes.setdefault(request.tier, [])
        if v is not None and (point := on_the_plane(v, slo)) is not None:
            points.append(point)
    return {t: np.array(points, dtype=np.float32).reshape(-1, 2) for t, points in planes.items()}


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
