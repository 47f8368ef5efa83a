"""One deadline for a task against deadlines for its rounds: `python -m loadgen.lab.tasks` prints
the table of docs/tasks.md. All get the same arrivals, and all are judged by the task's deadline.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from msgspec import Struct

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.session import rounds
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.core.record.verdict import GOOD_ENDS
from shared.rules.tiers import BUILT_IN, Tier, TierSet
from shared.vocabulary import Slo

PROFILE, CONTEXT_TOKENS, KV_TOKENS, BLOCK_TOKENS = "a100-llama3-8b", 32_768, 400_000, 16
SECONDS = 100.0  # in which tasks arrive
TASK, EVEN, PUBLISHED = "task", "even", "published"


class Load(NamedTuple):
    """`rates_rps`: tasks a second for one replica, near its capacity and above."""

    task_s: float
    mean_rounds: float
    rates_rps: tuple[float, float]
    published: str = ""  # a tier set with deadlines per round


LOADS = {
    "toolllm": Load(20.0, 2.7, (4.0, 6.0), "slos-serve-toolllm"),
    "agent-loops": Load(60.0, 12.5, (0.8, 1.2)),
}


class Job(Struct, frozen=True, kw_only=True):
    load: str
    rate_rps: float
    policy: str
    deadlines: str
    seed: int
    seconds: float = SECONDS


class Row(Struct, frozen=True, kw_only=True):
    job: Job
    tasks: int
    in_time: int


def tiers_of(job: Job) -> TierSet:
    load = LOADS[job.load]
    if job.deadlines == PUBLISHED:
        return BUILT_IN[load.published]
    slo = Slo(task_ttlt_s=load.task_s)
    if job.deadlines == EVEN:
        slo = Slo(ttlt_s=load.task_s / load.mean_rounds)
    return TierSet(name=job.deadlines, default="agent", tiers={"agent": Tier(slo=slo)})


def run(job: Job) -> Row:
    tiers = tiers_of(job)
    arrivals = draw_arrivals(Gaps(), job.rate_rps, job.seconds, job.seed, ((1.0, 1.0),))
    requests = plan_requests(arrivals, named_workload(job.load, CONTEXT_TOKENS), tiers, job.seed)
    # a task of one round is of a session, too: its caller does not know that it will be the last
    requests = [each._replace(session=each.session or f"one-{each.number}") for each in requests]
    facts = ReplicaFacts(kv_blocks=KV_TOKENS // BLOCK_TOKENS, context_tokens=CONTEXT_TOKENS)
    deployment = Deployment(job.policy, PROFILE, 1, draft=0.0, facts=facts)
    result = simulate(Traffic(requests, tiers, job.seed), deployment)
    found = in_time(requests, result, LOADS[job.load].task_s)
    return Row(job=job, tasks=len(found), in_time=sum(found))


def in_time(
    requests: Sequence[PlannedRequest], result: SimulationResult, task_s: float
) -> list[bool]:
    """[tasks] whether its last round ended well within `task_s` of its first one's arrival."""
    verdicts = {
        each.number: verdict for each, verdict in zip(requests, result.verdicts, strict=True)
    }
    found = []
    for first, *later in rounds(requests):
        last = verdicts[later[-1].number if later else first.number]
        due_s = first.arrival_s + task_s
        well = last is not None and last.finish_reason in GOOD_ENDS
        found.append(last is not None and well and last.ended_unix_s <= due_s)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, action="append", help="default: 5 and 6")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="default: all")
    parser.add_argument("--policy", action="append", help="default: slackline and qoserve")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    seeds = args.seed or [5, 6]
    jobs = [
        Job(load=load, rate_rps=rate_rps, policy=policy, deadlines=deadlines, seed=seed)
        for load in args.load or LOADS
        for rate_rps in LOADS[load].rates_rps
        for policy in args.policy or ("slackline", "qoserve")
        for deadlines in (PUBLISHED, EVEN, TASK)
        if deadlines != PUBLISHED or LOADS[load].published
        for seed in seeds
    ]
    print("| load | tasks/s | policy | deadlines | tasks in time |")
    print("|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        shares = list[str]()
        for row in pool.map(run, jobs):
            job = row.job
            shares.append(f"{100 * row.in_time / row.tasks:.1f}")
            if len(shares) == len(seeds):
                cells = (job.load, f"{job.rate_rps:g}", job.policy, job.deadlines)
                print(f"| {' | '.join(cells)} | {', '.join(shares)} % |", flush=True)
                shares.clear()


if __name__ == "__main__":
    main()
