"""One simulated run of the laboratory: its inputs as data, and its result."""

import datetime as dt
import hashlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from loadgen.load.arrivals import draw_arrivals, parse_gaps, parse_profile
from loadgen.load.lengths.laws import Lengths
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import LengthSource, named_workload
from loadgen.simulator.deployment import Deployment, Outage, ReplicaFacts
from loadgen.simulator.latency import LATENCIES
from loadgen.trials.figures import Figures, figures_of
from loadgen.trials.trial import Trial, most_missed
from shared.perf.draft import DRAFT, DraftCost
from shared.rules.tiers import QOSERVE_3, TierSet
from shared.vocabulary import Definition

# The version of a policy's figures: raise it with every change that moves them.
VERSIONS: dict[str, int] = {"slackline": 6}
BURSTS, BURSTY_GAPS = "azure-code", "gamma:2"  # the stand-in for that trace: docs/simulator.md
PROFILE = "a100-llama3-8b-qoserve"
CONTEXT_TOKENS = 18_432  # the longest of azure-conv, 16,384 and 2,048
SEED = 1
BLOCK_TOKENS = 16
# A replica of the papers queues every request itself: it refuses none for want of a slot, and hands
# no relegated request to another replica.
MAX_SLOTS = 65_536

WITHOUT = "without"  # a setting that only runs of the laboratory have: MODULE.CONSTANT=VALUE
MODULES = ("bounds", "prices", "give_way", "kv", "iteration", "drafts", "policy")


class Run(Struct, frozen=True, kw_only=True):
    """One run over the requests of a workload. The defaults are those of QoServe's experiments."""

    policy: str
    settings: dict[str, str] = field(default_factory=dict)
    workload: str
    rate_rps: float
    duration_s: float
    tiers: TierSet = QOSERVE_3
    replicas: int = 1
    bursts: str = ""  # as --bursts, or separately for each tier: TIER=...;TIER=...
    important: float = 0.0  # as --important
    only: str = ""  # serve only the requests of this tier, as in a silo
    first_token_only: bool = False  # as on the prefill nodes of a disaggregated fleet
    most_violated: float = 1.0  # stop the run once more than this fraction is violated
    seed: int = SEED
    latency: str = "none"  # as --latency
    profile: str = PROFILE
    definition: str = "deadline"
    context_tokens: int = CONTEXT_TOKENS
    arrivals: str = "poisson"  # as --arrivals
    draft: DraftCost = DRAFT
    # As --wait: requests that have not ended so long after the last arrival are violated. None:
    # wait for all.
    wait_s: float | None = None
    kv_tokens: int = 0  # of each replica; 0: the number that the profile states
    engine_times: float = 1.0  # as of a `Deployment`
    length_times: float = 1.0  # as of a `Deployment`
    outages: tuple[Outage, ...] = ()  # as of a `Deployment`; each with an end

    @property
    def key(self) -> str:
        """The name of the run, whatever its policy's version. 4 and 4.0 are one rate."""
        same = msgspec.convert(msgspec.to_builtins(self), Run)
        return hashlib.sha256(msgspec.json.encode(same, order="sorted")).hexdigest()[:24]

    @property
    def version(self) -> int:
        return VERSIONS.get(self.policy, 1)


class RunResult(Struct, frozen=True, kw_only=True):
    """`figures` is None if the run was stopped because more than `most_violated` were violated."""

    run: Run
    figures: Figures | None
    on: str  # the date
    wall_s: float


def violated_fraction(figures: Figures) -> float:
    """The violated fraction of requests, or of sessions where a paper's capacity counts those."""
    by_session = figures.by_session
    return figures.violated_fraction if by_session is None else by_session.violated_fraction


class FirstTokenOnly:
    """Lengths of requests that end with their first token."""

    def __init__(self, source: LengthSource) -> None:
        self._source = source

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        return self._source.draw(index, rank, rng)._replace(output_tokens=1)


def lengths_of(run: Run) -> LengthSource:
    source = named_workload(run.workload, run.context_tokens)
    return FirstTokenOnly(source) if run.first_token_only else source


def requests_of(run: Run) -> list[PlannedRequest]:
    """The requests of a run, in the order of arrival. Raises ConfigError."""
    lengths = lengths_of(run)
    if "=" in run.bursts:
        return _requests_by_tier(run, lengths)
    profile = parse_profile(run.bursts, run.duration_s) if run.bursts else ((1.0, 1.0),)
    arrivals_s = draw_arrivals(
        parse_gaps(run.arrivals), run.rate_rps, run.duration_s, run.seed, profile
    )
    requests = plan_requests(arrivals_s, lengths, run.tiers, run.seed, important=run.important)
    return [request for request in requests if request.tier == run.only] if run.only else requests


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
        hand_back=False,
        engine_times=run.engine_times,
        length_times=run.length_times,
        outages=run.outages,
    )
    return Trial(
        deployment=deployment,
        tiers=run.tiers.judged_by(Definition(run.definition)),
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


def execute(run: Run) -> RunResult:
    """Simulates the run. Raises ConfigError."""
    requests = requests_of(run)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    constant = run.settings.get(WITHOUT, "")
    settings = {key: value for key, value in run.settings.items() if key != WITHOUT}
    trial = trial_of(replace(run, settings=settings))
    # None for sessions with rounds, which are judged at the end: such a run cannot stop early.
    most = most_missed(requests, run.most_violated)
    with changed(constant):
        result = trial.serve(requests, keep_times=False, most_missed=most)
    figures = None if result.stopped else figures_of(trial, requests, result)
    return RunResult(run=run, figures=figures, on=today, wall_s=result.wall_s)
