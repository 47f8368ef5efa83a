"""Routers side by side on prompts that begin alike: `python -m loadgen.lab.routers` prints the
table of docs/prefixes.md. All get the same arrivals, policy and index of prefixes.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from loadgen.lab.routers.peers import ROUTERS
from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.trace import read_trace
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
    load: str
    router: str
    replicas: int
    seed: int
    policy: str = "slackline"
    trace: str = ""
    host_kv_tokens: int = 0


class Row(Struct, frozen=True, kw_only=True):
    """`found`: of the prompt tokens, in a prefix cache."""

    job: Job
    met: float
    found: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput_rps: float  # requests whose SLO was met


def requests_of(job: Job) -> list[PlannedRequest]:
    load = LOADS[job.load]
    if job.load == TRACE:
        trace, rng = read_trace(Path(job.trace)).within(CONTEXT_TOKENS), Random(job.seed)
        times = load.rate_rps * job.replicas / 8
        # Mooncake's times are rounded to three seconds
        arrivals = sorted(((row.arrival_s or 0.0) + 3 * rng.random()) / times for row in trace.rows)
        return plan_requests(arrivals, Rows(trace, in_order=True), CHAT, job.seed)
    rate_rps = load.rate_rps * job.replicas
    arrivals = draw_arrivals(Gaps(), rate_rps, load.seconds, job.seed, ((1.0, 1.0),))
    lengths = named_workload(job.load, CONTEXT_TOKENS)
    return plan_requests(arrivals, lengths, CHAT, job.seed)


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
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=5, help="nothing was chosen with 5")
    parser.add_argument("--replicas", type=int, action="append", help="default: 8")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="default: all")
    parser.add_argument("--router", action="append", choices=list(ROUTERS), help="default: all")
    parser.add_argument("--trace", default="", help="a trace with prefixes, as of Mooncake")
    parser.add_argument("--policy", default="slackline")
    parser.add_argument("--host-kv-tokens", type=int, default=0, help="in each host's memory")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    jobs = [
        Job(
            load=load,
            router=router,
            replicas=replicas,
            seed=args.seed,
            policy=args.policy,
            trace=args.trace,
            host_kv_tokens=args.host_kv_tokens,
        )
        for load in args.load or LOADS
        if args.trace or load != TRACE
        for replicas in args.replicas or [8]
        for router in args.router or ROUTERS
    ]
    print("| load | replicas | router | SLOs met | found | TTFT p50, p99 | goodput |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(run, jobs):
            job = row.job
            print(
                f"| {job.load} | {job.replicas} | {job.router} | {100 * row.met:.1f} % | "
                f"{100 * row.found:.1f} % | {row.ttft_p50_s:.2f}, {row.ttft_p99_s:.2f} s | "
                f"{row.goodput_rps:.1f}/s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
