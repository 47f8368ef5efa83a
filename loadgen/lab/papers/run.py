"""One simulated run: its inputs as data, and its result."""

import datetime as dt
import hashlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from loadgen.bound.limit import Bound, bound
from loadgen.load.arrivals import draw_arrivals, parse_gaps, parse_profile
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.trace import Trace, read_trace
from loadgen.load.workload import WORKLOADS, Lengths, LengthSource, Rows, named_workload
from loadgen.simulator.deployment import ACCEPTANCE, Deployment, Outage, ReplicaFacts
from loadgen.simulator.latency import LATENCIES
from loadgen.trials.figures import Figures, figures_of
from loadgen.trials.trial import Trial, most_missed
from shared.errors import ConfigError
from shared.perf.draft import DRAFT, DraftCost
from shared.rules.tiers import QOSERVE_3, TierSet
from shared.vocabulary import Definition

# The version of a policy's figures: raise it with every change that moves them.
VERSIONS: dict[str, int] = {"slackline": 3}
BURSTS, BURSTY_GAPS = "azure-code", "gamma:2"  # the stand-in for that trace: docs/simulator.md
PROFILE = "a100-llama3-8b-qoserve"
CONTEXT_TOKENS = 18_432  # the longest of azure-conv, 16,384 and 2,048
SEED = 1
BOUND = "bound"  # in place of a policy: the attainment that no policy can exceed
BLOCK_TOKENS = 16
# A replica of the papers queues every request itself: it refuses none for want of a slot, and hands
# no relegated request to another replica.
MAX_SLOTS = 65_536

WITHOUT = "without"  # a setting of the laboratory's runs alone: MODULE.CONSTANT=VALUE
MODULES = ("bounds", "prices", "give_way", "kv", "iteration", "drafts", "policy")
KEPT = 0.8  # of the rows of a recorded trace
# Times of this trace were rounded down to multiples of so many seconds.
ROUNDED_S = {"mooncake_conversation_first_half": 3.0}


class Half(StrEnum):
    FIRST = "first"
    SECOND = "second"


class Run(Struct, frozen=True, kw_only=True):
    """One run over the requests of a workload. The defaults are those of QoServe's experiments."""

    policy: str
    settings: dict[str, str] = field(default_factory=dict)
    # built in, or the name of a trace file without its endings: lengths come from it, arrivals do
    # not
    workload: str
    rate_rps: float
    duration_s: float
    tiers: TierSet = QOSERVE_3
    replicas: int = 1
    bursts: str = ""  # as --bursts, or separately for each tier: TIER=...;TIER=...
    important: float = 0.0  # as --important
    only: str = ""  # serve the requests of this tier alone, as in a silo
    first_token_only: bool = False  # as on the prefill nodes of a disaggregated fleet
    most_violated: float = 1.0  # stop the run once more than this fraction is violated
    seed: int = SEED
    latency: str = "none"  # as --latency
    profile: str = PROFILE
    definition: str = "deadline"
    context_tokens: int = CONTEXT_TOKENS
    arrivals: str = "poisson"  # as --arrivals
    draft: DraftCost = DRAFT
    acceptance: float = ACCEPTANCE
    # As --wait: requests that have not ended so long after the last arrival are violated. None:
    # wait for all.
    wait_s: float | None = None
    kv_tokens: int = 0  # of each replica; 0: as many as the profile states
    engine_times: float = 1.0  # as of a `Deployment`
    length_times: float = 1.0  # as of a `Deployment`
    outages: tuple[Outage, ...] = ()  # as of a `Deployment`; each with an end
    # Of a trace: this half of its time alone, and with its arrivals.
    half: Half | None = None

    @property
    def key(self) -> str:
        """The name of the run whatever the version of its policy. Numbers count by value: 4 and
        4.0 are one rate.
        """
        same = msgspec.convert(msgspec.to_builtins(self), Run)
        return hashlib.sha256(msgspec.json.encode(same, order="sorted")).hexdigest()[:24]

    @property
    def version(self) -> int:
        return VERSIONS.get(self.policy, 1)


class RunResult(Struct, frozen=True, kw_only=True):
    """The result of a run: its figures, or its bound if its policy is BOUND.

    `figures` is None if the run was stopped because more than `most_violated` were violated.
    """

    run: Run
    figures: Figures | None
    on: str  # the date
    wall_s: float
    bound: Bound | None = None


def violated_fraction(figures: Figures) -> float:
    """The violated fraction of what a paper's capacity counts.

    That is requests, or sessions where sessions have rounds.
    """
    by_session = figures.by_session
    return figures.violated_fraction if by_session is None else by_session.violated_fraction


class FirstTokenOnly:
    """Lengths of requests that end with their first token."""

    def __init__(self, source: LengthSource) -> None:
        self._source = source

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        return self._source.draw(index, rank, rng)._replace(output_tokens=1)


def lengths_of(run: Run, traces: Path | None) -> LengthSource:
    """The source of the prompt and output lengths. Raises ConfigError for a missing trace."""
    source: LengthSource
    if run.workload in WORKLOADS:
        source = named_workload(run.workload, run.context_tokens)
    else:
        source = Rows(_trace(run, traces), in_order=False)
    return FirstTokenOnly(source) if run.first_token_only else source


def _trace(run: Run, traces: Path | None) -> Trace:
    """The rows of its trace that fit its context. Raises ConfigError for a missing trace."""
    if traces is None:
        raise ConfigError(f"trace {run.workload}: name its folder with --traces")
    return read_trace(traces / f"{run.workload}.csv.gz").within(run.context_tokens)


def requests_of(run: Run, traces: Path | None) -> list[PlannedRequest]:
    """The requests of a run, in the order of arrival. Raises ConfigError."""
    if run.half is not None:
        return recorded_requests(
            _trace(run, traces),
            run.half,
            rate_rps=run.rate_rps,
            duration_s=run.duration_s,
            tiers=run.tiers,
            seed=run.seed,
        )
    lengths = lengths_of(run, traces)
    if "=" in run.bursts:
        return _requests_by_tier(run, lengths)
    profile = parse_profile(run.bursts, run.duration_s) if run.bursts else ((1.0, 1.0),)
    arrivals_s = draw_arrivals(
        parse_gaps(run.arrivals), run.rate_rps, run.duration_s, run.seed, profile
    )
    requests = plan_requests(arrivals_s, lengths, run.tiers, run.seed, important=run.important)
    return [request for request in requests if request.tier == run.only] if run.only else requests


def recorded_requests(
    trace: Trace, half: Half, *, rate_rps: float, duration_s: float, tiers: TierSet, seed: int
) -> list[PlannedRequest]:
    """The requests of the first `duration_s` of this half, at `rate_rps` in the mean of the half.
    Raises ConfigError for a trace without times.

    The rate is reached in two steps. A part of the rows is kept, drawn with the seed, so that there
    are several loads of one trace. Then the time of the half is stretched or shortened as a whole,
    which leaves its bursts as they are beside each other.
    """
    if not trace.recorded:
        raise ConfigError(f"trace {trace.name} has no arrival times")
    rng, middle_s = Random(f"{trace.name}/{seed}"), trace.span_s / 2
    rounded_s, begin_s = ROUNDED_S.get(trace.name, 0.0), middle_s if half is Half.SECOND else 0.0
    rows = [
        row._replace(arrival_s=arrival_s - begin_s + rng.uniform(0.0, rounded_s))
        for row, arrival_s in ((row, row.arrival_s or 0.0) for row in trace.rows)
        if (arrival_s >= middle_s) == (half is Half.SECOND) and rng.random() < KEPT
    ]
    times = len(rows) / (rate_rps * middle_s)  # what a second becomes
    rows = [row._replace(arrival_s=(row.arrival_s or 0.0) * times) for row in rows]
    rows = sorted(
        (row for row in rows if (row.arrival_s or 0.0) < duration_s),
        key=lambda row: row.arrival_s or 0.0,
    )
    arrivals_s = [row.arrival_s or 0.0 for row in rows]
    return plan_requests(arrivals_s, Rows(Trace(trace.name, rows), in_order=True), tiers, seed)


def _requests_by_tier(run: Run, lengths: LengthSource) -> list[PlannedRequest]:
    """The requests of a run whose tiers have separate arrivals.

    `bursts` is TIER=SECONDS:MULTIPLE,...;TIER=..., in multiples of the rate. Shares are ignored.
    """
    requests: list[PlannedRequest] = []
    for rank, (tier, bursts) in enumerate(part.split("=") for part in run.bursts.split(";")):
        seed, profile = run.seed + rank, parse_profile(bursts, run.duration_s)
        arrivals_s = draw_arrivals(
            parse_gaps(run.arrivals), run.rate_rps, run.duration_s, seed, profile
        )
        alone = {
            name: replace(other, share=float(name == tier))
            for name, other in run.tiers.tiers.items()
        }
        requests += plan_requests(
            arrivals_s, lengths, replace(run.tiers, tiers=alone), seed, important=run.important
        )
    assert all(request.after is None for request in requests), "a session of rounds"
    return [
        request._replace(number=n)
        for n, request in enumerate(sorted(requests, key=lambda request: request.arrival_s))
    ]


def _judged(run: Run) -> TierSet:
    return run.tiers.judged_by(Definition(run.definition))


def trial_of(run: Run) -> Trial:
    """The trial of this run."""
    deployment = Deployment(
        run.policy,
        run.profile,
        run.replicas,
        run.settings,
        LATENCIES[run.latency],
        ReplicaFacts(
            kv_blocks=run.kv_tokens // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            context_tokens=run.context_tokens,
            max_slots=MAX_SLOTS,
        ),
        draft=run.draft,
        acceptance=run.acceptance,
        hand_back=False,
        engine_times=run.engine_times,
        length_times=run.length_times,
        outages=run.outages,
    )
    return Trial(
        deployment=deployment,
        tiers=_judged(run),
        workload=run.workload,
        rate_rps=run.rate_rps,
        duration_s=run.duration_s,
        seed=run.seed,
        wait_s=run.wait_s,
    )


@contextmanager
def changed(constant: str) -> Iterator[None]:
    """The policy `slackline` with another constant: MODULE.CONSTANT=VALUE; "" for none."""
    if not constant:
        yield
        return
    named, _, value = constant.partition("=")
    of_name, _, name = named.partition(".")
    every = [importlib.import_module(f"shared.policy.slackline.{one}") for one in MODULES]
    before = getattr(every[MODULES.index(of_name)], name)
    # other modules have it by name, too
    holders = [module for module in every if getattr(module, name, None) is before]
    try:
        for module in holders:
            setattr(module, name, type(before)(float(value)))
        yield
    finally:
        for module in holders:
            setattr(module, name, before)


def execute(run: Run, traces: Path | None = None) -> RunResult:
    """Simulates the run. Raises ConfigError."""
    requests = requests_of(run, traces)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    if run.policy == BOUND:
        limit = bound(requests, _judged(run), run.profile, run.replicas)
        return RunResult(run=run, figures=None, on=today, wall_s=limit.wall_s, bound=limit)
    constant = run.settings.get(WITHOUT, "")
    settings = {key: value for key, value in run.settings.items() if key != WITHOUT}
    trial = trial_of(replace(run, settings=settings))
    # None for sessions with rounds, which are judged at the end: such a run cannot stop early.
    most = most_missed(requests, run.most_violated)
    with changed(constant):
        result = trial.serve(requests, keep_times=False, most_missed=most)
    figures = None if result.stopped else figures_of(trial, requests, result)
    return RunResult(run=run, figures=figures, on=today, wall_s=result.wall_s)
