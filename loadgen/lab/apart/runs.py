"""One run: a load under a policy, on replicas that serve together or apart."""

from collections.abc import Mapping
from random import Random
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.lengths.laws import Lengths
from loadgen.load.mix import plan_requests
from loadgen.load.workload import LengthSource, named_workload
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from loadgen.trials.trial import most_missed
from shared.rules.tiers import QOSERVE_3, Tier, TierSet
from shared.vocabulary import Role, Slo

CONTEXT_TOKENS = 18_432  # as of the papers' runs
PACES = {
    "25 ms": Slo(ttft_s=1.5, tbt_s=0.025),
    "100 ms": Slo(ttft_s=3.0, tbt_s=0.1),
    "16 ms": Slo(ttft_s=1.0, tbt_s=0.016),  # a pass of decodes takes most of that
}
# Prefill first-come first-served in whole prompts, decode first-come. Together it is vLLM as that
# was when DistServe came.
DISTSERVE = "DistServe"
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "qoserve": {"alpha_low_s": "0.008"},  # as in loads.py of the papers
    "fcfs": {"chunk_tokens": "8192"},
    "edf": {"chunk_tokens": "8192"},
    "vllm": {"mode": "prefill_first"},
}


class Ratio(NamedTuple):
    """Lengths between half and one and a half of these."""

    prompt_tokens: int
    output_tokens: int

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        prompt, output = (round(n * rng.uniform(0.5, 1.5)) for n in self)
        return Lengths(prompt, output, "ratio")

    def __str__(self) -> str:
        return f"{self.prompt_tokens}:{self.output_tokens}"


class Job(Struct, frozen=True, kw_only=True):
    """`prefill`: so many of the replicas compute prompts only, the others have the role `rest`; 0:
    together. `load`: PROMPT:OUTPUT, or a workload. `tiers`: a pace of PACES, or QoServe's.
    """

    policy: str
    load: str
    tiers: str
    rate_rps: float
    seconds: float
    seed: int
    profile: str
    replicas: int
    prefill: int = 0
    rest: Role = Role.DECODE
    link_gbit_s: float = 0.0
    settings: tuple[tuple[str, str], ...] = ()  # beside SETTINGS
    first_token_only: bool = False
    most_violated: float = 1.0


class Row(Struct, frozen=True, kw_only=True):
    job: Job
    met: float  # of all requests; a bound where the run was stopped
    ttft_p99_s: float
    gap_p99_s: float  # the worst of a request


class FirstTokens(NamedTuple):
    """Requests that end with their first token."""

    source: LengthSource

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        return self.source.draw(index, rank, rng)._replace(output_tokens=1)


def lengths_of(job: Job) -> LengthSource:
    prompt, _, output = job.load.partition(":")
    if output:
        return Ratio(int(prompt), int(output))
    source = named_workload(job.load, CONTEXT_TOKENS)
    return FirstTokens(source) if job.first_token_only else source


def tiers_of(job: Job) -> TierSet:
    pace = PACES.get(job.tiers)
    if pace is None:
        return QOSERVE_3
    return TierSet(name=job.tiers, default="all", tiers={"all": Tier(slo=pace)})


def run(job: Job) -> Row:
    tiers, policy = tiers_of(job), job.policy
    if policy == DISTSERVE:
        policy = "fcfs" if job.prefill else "vllm"
    arrivals = draw_arrivals(Gaps(), job.rate_rps, job.seconds, job.seed, ((1.0, 1.0),))
    requests = plan_requests(arrivals, lengths_of(job), tiers, job.seed)
    roles = [Role.PREFILL] * job.prefill + [job.rest] * (job.prefill > 0)
    deployment = Deployment(
        policy,
        job.profile,
        job.replicas,
        {**SETTINGS.get(policy, {}), **dict(job.settings)},
        facts=ReplicaFacts(context_tokens=CONTEXT_TOKENS, max_slots=4096),
        draft=0.0,
        roles=roles,
        link_gbit_s=job.link_gbit_s,
    )
    options = RunOptions(most_missed=most_missed(requests, job.most_violated))
    result = simulate(Traffic(requests, tiers, job.seed), deployment, options)
    ended = [verdict for verdict in result.verdicts if verdict is not None]

    def p99(values: list[float | None]) -> float:
        known = [value for value in values if value is not None]
        return float(np.percentile(known, 99)) if known else 0.0

    return Row(
        job=job,
        met=result.met_fraction,
        ttft_p99_s=p99([verdict.ttft_s for verdict in ended]),
        gap_p99_s=p99([verdict.worst_tbt_s for verdict in ended]),
    )
