"""One simulated run of an experiment: all that decides it, as data; and what is kept of it."""

import datetime as dt
import hashlib
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from loadgen.bound.limit import Bound, bound
from loadgen.lab.figures import Figures
from loadgen.lab.trial import Trial
from loadgen.load.arrivals import draw_arrivals, parse_gaps, parse_profile
from loadgen.load.definition import DEADLINE
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.session import has_rounds
from loadgen.load.trace import read_trace
from loadgen.load.workload import WORKLOADS, Lengths, LengthSource, Rows, named_workload
from loadgen.simulator.simulation import ACCEPTANCE, DRAFT
from shared.errors import ConfigError
from shared.tiers import QOSERVE_3, Tier, TierSet

# of what a run means: raised with every change of simulator or policies that moves figures
VERSION = 1
PROFILE = "a100-llama3-8b-qoserve"
CONTEXT_TOKENS = 18_432  # the longest of azure-conv, 16,384 and 2,048
SEED = 1
BOUND = "bound"  # in place of a policy: what none of them can exceed
# A paper's replica queues whoever comes, itself: nobody is turned away for want of a slot, nobody
# relegated is handed elsewhere.
MAX_SLOTS = 65_536


class Run(Struct, frozen=True, kw_only=True):
    """Requests of one workload. What is not said is as in QoServe's experiments."""

    policy: str
    settings: dict[str, str] = field(default_factory=dict)
    # built in, or a trace file's name without its endings: its lengths, not its arrivals
    workload: str
    rate_rps: float
    duration_s: float
    tiers: TierSet = QOSERVE_3
    replicas: int = 1
    bursts: str = ""  # as --bursts, or for each tier by itself: TIER=...;TIER=...
    important: float = 0.0  # as --important
    only: str = ""  # the requests of this tier alone, as in a silo of its own
    first_token_only: bool = False  # as on the prefill nodes of a disaggregated fleet
    most_violated: float = 1.0  # a run that is known to exceed this fraction is stopped
    seed: int = SEED
    latency: str = "none"  # as --latency
    profile: str = PROFILE
    definition: str = DEADLINE
    context_tokens: int = CONTEXT_TOKENS
    arrivals: str = "poisson"  # as --arrivals
    draft: float = DRAFT
    acceptance: float = ACCEPTANCE
    # as --wait: what has not ended so long after the last arrival is violated; None: all are waited
    # for
    wait_s: float | None = None

    @property
    def digest(self) -> str:
        """The same however its numbers were written: 4 and 4.0 are one rate. Fields that came later
        count only where they say something, so that the runs kept from before are found.
        """
        same = msgspec.to_builtins(msgspec.convert(msgspec.to_builtins(self), Run))
        _leave_out_defaults(Run, same, _FIRST_FIELDS)
        for tier in same["tiers"]["tiers"].values():
            _leave_out_defaults(Tier, tier, _FIRST_TIER_FIELDS)
        return hashlib.sha256(
            b"%d" % VERSION + msgspec.json.encode(same, order="sorted")
        ).hexdigest()[:24]


# What the first runs that are kept knew of; what else there is has a default.
_FIRST_FIELDS = {
    *(
        "policy",
        "settings",
        "workload",
        "rate_rps",
        "duration_s",
        "tiers",
        "replicas",
        "bursts",
        "important",
        "only",
    ),
    *("first_token_only", "most_violated", "seed"),
}
_FIRST_TIER_FIELDS = {"slo", "share", "service_tier", "importance"}


def _leave_out_defaults(kind: type[Struct], values: dict[str, Any], kept: set[str]) -> None:
    for known in msgspec.structs.fields(kind):
        if known.name not in kept and values[known.name] == known.default:
            del values[known.name]


class Made(Struct, frozen=True, kw_only=True):
    """What came of a run; figures are None where it was stopped: more than `most_violated` were. Of
    BOUND there is a bound instead.
    """

    run: Run
    figures: Figures | None
    on: str  # the day
    wall_s: float
    bound: Bound | None = None


def violated_fraction(of: Figures) -> float:
    """Of what a paper's capacity counts: requests, or sessions where they have rounds."""
    return of.violated_fraction if of.by_session is None else of.by_session.violated_fraction


class FirstTokenOnly:
    """Lengths of requests that end with their first token."""

    def __init__(self, source: LengthSource) -> None:
        self._source = source

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        return self._source.draw(index, rank, rng)._replace(output_tokens=1)


def lengths_of(run: Run, traces: Path | None) -> LengthSource:
    """Raises ConfigError for a trace that is not there."""
    source: LengthSource
    if run.workload in WORKLOADS:
        source = named_workload(run.workload, run.context_tokens)
    elif traces is None:
        raise ConfigError(f"trace {run.workload}: --traces says in which folder it is")
    else:
        source = Rows(
            read_trace(traces / f"{run.workload}.csv.gz").within(run.context_tokens), in_order=False
        )
    return FirstTokenOnly(source) if run.first_token_only else source


def requests_of(run: Run, traces: Path | None) -> list[PlannedRequest]:
    """Raises ConfigError."""
    lengths = lengths_of(run, traces)
    if "=" in run.bursts:
        return _each_tier_in_its_time(run, lengths)
    profile = parse_profile(run.bursts, run.duration_s) if run.bursts else ((1.0, 1.0),)
    arrivals_s = draw_arrivals(
        parse_gaps(run.arrivals), run.rate_rps, run.duration_s, run.seed, profile
    )
    requests = plan_requests(arrivals_s, lengths, run.tiers, run.seed, important=run.important)
    return [request for request in requests if request.tier == run.only] if run.only else requests


def _each_tier_in_its_time(run: Run, lengths: LengthSource) -> list[PlannedRequest]:
    """Every tier has arrivals of its own, `bursts` being TIER=SECONDS:MULTIPLE,...;TIER=... of the
    rate; shares say nothing.
    """
    requests: list[PlannedRequest] = []
    for rank, (tier, bursts) in enumerate(one.split("=") for one in run.bursts.split(";")):
        seed, profile = run.seed + rank, parse_profile(bursts, run.duration_s)
        arrivals_s = draw_arrivals(
            parse_gaps(run.arrivals), run.rate_rps, run.duration_s, seed, profile
        )
        alone = {
            name: replace(of, share=float(name == tier)) for name, of in run.tiers.tiers.items()
        }
        requests += plan_requests(
            arrivals_s, lengths, replace(run.tiers, tiers=alone), seed, important=run.important
        )
    assert all(request.after is None for request in requests), "a session of rounds"
    return [
        request._replace(number=n)
        for n, request in enumerate(sorted(requests, key=lambda request: request.arrival_s))
    ]


def make(run: Run, traces: Path | None = None) -> Made:
    """Runs it. Raises ConfigError."""
    requests, today = requests_of(run, traces), dt.datetime.now(dt.UTC).date().isoformat()
    if run.policy == BOUND:
        limit = bound(requests, run.tiers, run.profile, run.replicas, run.definition)
        return Made(run=run, figures=None, on=today, wall_s=limit.wall_s, bound=limit)
    trial = Trial(
        policy=run.policy,
        settings=run.settings,
        profile=run.profile,
        replicas=run.replicas,
        workload=run.workload,
        tiers=run.tiers,
        latency=run.latency,
        definition=run.definition,
        seed=run.seed,
        duration_s=run.duration_s,
        rate_rps=run.rate_rps,
        context_tokens=run.context_tokens,
        draft=run.draft,
        acceptance=run.acceptance,
        max_slots=MAX_SLOTS,
        hand_back=False,
        wait_s=run.wait_s,
    )
    # Of sessions with rounds it is not known as they go.
    most_missed = None if has_rounds(requests) else int(run.most_violated * len(requests) + 1e-9)
    result = trial.serve(requests, keep_times=False, most_missed=most_missed)
    found = None if result.stopped else trial.judge(requests, result)
    return Made(run=run, figures=found, on=today, wall_s=result.wall_s)
