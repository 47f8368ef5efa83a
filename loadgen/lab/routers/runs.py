"""One run: a load of prompts that begin alike, under a router and a policy."""

from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from loadgen.lab.routers.peers import ROUTERS
from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.trace import Trace, read_trace
from loadgen.load.workload import Rows, named_workload
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Slo

PROFILE, CONTEXT_TOKENS, BLOCK_TOKENS = "a100-llama3-8b", 32_768, 16
CHAT = TierSet(name="chat", default="chat", tiers={"chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.08))})
TRACE = "trace"


class Load(NamedTuple):
    """`rate_rps`: sessions or requests a second for each replica; for the trace, how many times as
    fast eight replicas get it. `kv_tokens`: of one replica.
    """

    rate_rps: float
    kv_tokens: int
    seconds: float = 100.0  # in which they arrive


LOADS = {
    "agent-loops": Load(0.9, 400_000, 150.0),
    "chat-sessions": Load(12.0, 400_000, 60.0),
    "rag": Load(6.0, 160_000),
    "system-prompt": Load(9.0, 160_000),
    TRACE: Load(1.5, 400_000),
}


class Job(Struct, frozen=True, kw_only=True):
    """`part`: of the time in which the load's requests arrive. `late_s`: the age of the prefixes
    that routers hear of.
    """

    load: str
    router: str
    replicas: int
    seed: int
    policy: str = "slackline"
    trace: str = ""
    part: float = 1.0
    late_s: float = 0.0
    host_kv_tokens: int = 0


class Row(Struct, frozen=True, kw_only=True):
    """`found`: of the prompt tokens, in a prefix cache. `imbalance`: the seconds in which the
    busiest replica computed, over the mean of all.
    """

    job: Job
    met: float
    found: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput_rps: float  # requests whose SLO was met
    imbalance: float


def requests_of(job: Job) -> list[PlannedRequest]:
    load = LOADS[job.load]
    if job.load == TRACE:
        trace, rng = _trace(job.trace), Random(job.seed)
        times = load.rate_rps * job.replicas / 8
        # Mooncake's times are rounded to three seconds
        arrivals = sorted(((row.arrival_s or 0.0) + 3 * rng.random()) / times for row in trace.rows)
        begun = arrivals[: int(job.part * len(arrivals))]
        return plan_requests(begun, Rows(trace, in_order=True), CHAT, job.seed)
    rate_rps, seconds = load.rate_rps * job.replicas, load.seconds * job.part
    arrivals = draw_arrivals(Gaps(), rate_rps, seconds, job.seed, ((1.0, 1.0),))
    lengths = named_workload(job.load, CONTEXT_TOKENS)
    return plan_requests(arrivals, lengths, CHAT, job.seed)


@cache
def _trace(path: str) -> Trace:
    return read_trace(Path(path)).within(CONTEXT_TOKENS)


def run(job: Job) -> Row:
    requests = requests_of(job)
    deployment = Deployment(
        job.policy,
        PROFILE,
        job.replicas,
        draft=0.0,
        facts=ReplicaFacts(
            kv_blocks=LOADS[job.load].kv_tokens // BLOCK_TOKENS,
            context_tokens=CONTEXT_TOKENS,
            host_kv_tokens=job.host_kv_tokens,
        ),
        router=ROUTERS[job.router],
        prefixes_late_s=job.late_s,
    )
    result = simulate(Traffic(requests, CHAT, job.seed), deployment)
    ended = [verdict for verdict in result.verdicts if verdict is not None]
    prompt_tokens = sum(verdict.prompt_tokens for verdict in ended)
    ttft_s = [verdict.ttft_s for verdict in ended if verdict.ttft_s is not None]
    return Row(
        job=job,
        met=result.met_fraction,
        found=sum(each.cached_tokens for each in ended) / prompt_tokens,
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        goodput_rps=result.met_fraction * len(requests) / result.simulated_s,
        imbalance=job.replicas * result.busiest_s / result.busy_s,
    )
