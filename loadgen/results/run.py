"""One simulated run of an experiment: all that decides it, as data; and what is kept of it."""

import datetime as dt
import hashlib
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct, field

from loadgen.arrivals import Gaps, draw_arrivals, parse_profile
from loadgen.definition import DEADLINE
from loadgen.mix import plan_requests
from loadgen.simulation import Figures, figures
from loadgen.trace import read_trace
from loadgen.trial import LATENCIES
from loadgen.workload import WORKLOADS, Lengths, LengthSource, Rows, named_workload
from shared.drive.virtual import ReplicaFacts, simulate
from shared.errors import ConfigError
from shared.tiers import QOSERVE_3, TierSet

VERSION = 1  # of what a run means: raised with every change of simulator or policies that moves figures
PROFILE = "a100-llama3-8b-qoserve"
CONTEXT_TOKENS = 18_432  # the longest of azure-conv, 16,384 and 2,048
SEED = 1
# A paper's replica queues whoever comes, itself: nobody is turned away for want of a slot, nobody relegated is handed elsewhere.
MAX_SLOTS = 65_536


class Run(Struct, frozen=True, kw_only=True):
    """Poisson arrivals of one workload, served to the last request, judged by `deadline`."""

    policy: str
    settings: dict[str, str] = field(default_factory=dict)
    workload: str  # built in, or a trace file's name without its endings: its lengths, not its arrivals
    rate_rps: float
    duration_s: float
    tiers: TierSet = QOSERVE_3
    replicas: int = 1
    bursts: str = ""  # as --bursts
    important: float = 0.0  # as --important
    only: str = ""  # the requests of this tier alone, as in a silo of its own
    first_token_only: bool = False  # as on the prefill nodes of a disaggregated fleet
    most_violated: float = 1.0  # a run that is known to exceed this fraction is stopped
    seed: int = SEED
    latency: str = "none"  # as --latency

    @property
    def digest(self) -> str:
        """The same however its numbers were written: 4 and 4.0 are one rate."""
        same = msgspec.to_builtins(msgspec.convert(msgspec.to_builtins(self), Run))
        if self.latency == "none":
            del same["latency"]  # as of the runs kept before there was another one
        return hashlib.sha256(b"%d" % VERSION + msgspec.json.encode(same, order="sorted")).hexdigest()[:24]


class Made(Struct, frozen=True, kw_only=True):
    """What came of a run; figures are None where it was stopped: more than `most_violated` were."""

    run: Run
    figures: Figures | None
    on: str  # the day
    wall_s: float


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
        source = named_workload(run.workload, CONTEXT_TOKENS)
    elif traces is None:
        raise ConfigError(f"trace {run.workload}: --traces says in which folder it is")
    else:
        source = Rows(read_trace(traces / f"{run.workload}.csv.gz").within(CONTEXT_TOKENS), in_order=False)
    return FirstTokenOnly(source) if run.first_token_only else source


def make(run: Run, traces: Path | None = None) -> Made:
    """Runs it. Raises ConfigError."""
    profile = parse_profile(run.bursts, run.duration_s) if run.bursts else ((1.0, 1.0),)
    arrivals_s = draw_arrivals(Gaps(), run.rate_rps, run.duration_s, run.seed, profile)
    requests = plan_requests(arrivals_s, lengths_of(run, traces), run.tiers, run.seed, important=run.important)
    if run.only:
        requests = [request for request in requests if request.tier == run.only]
    result = simulate(
        requests,
        run.policy,
        run.settings,
        PROFILE,
        run.replicas,
        run.tiers,
        LATENCIES[run.latency](),
        run.seed,
        facts=ReplicaFacts(context_tokens=CONTEXT_TOKENS, max_slots=MAX_SLOTS),
        hand_back=False,
        most_missed=int(run.most_violated * len(requests) + 1e-9),
    )
    found = None
    if not result.stopped:
        found = figures(
            requests,
            result,
            policy=run.policy,
            settings=run.settings,
            profile=PROFILE,
            replicas=run.replicas,
            seed=run.seed,
            latency=run.latency,
            duration_s=run.duration_s,
            definition=DEADLINE,
            rate_rps=run.rate_rps,
        )
    return Made(run=run, figures=found, on=dt.datetime.now(dt.UTC).date().isoformat(), wall_s=result.wall_s)
