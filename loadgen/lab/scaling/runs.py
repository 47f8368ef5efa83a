"""Runs of a day in the simulator: by a law, by a timetable, and with fixed numbers of replicas."""

from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct

from loadgen.lab.scaling.days import DAYS, TIERS
from loadgen.lab.scaling.laws import Planner, QueueLength, Saturation, Timetable
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.elastic.law import Law, OurLaw, Scaling
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from shared.policy import registry

PROFILE, MOST, BEGIN = "a100-llama3-70b-tp4", 12, 3
DROWNED = 0.3
QUEUE = 0.5  # requests that wait, a replica: of 0.5 and 2 it costs less, on seed 1
LAWS: Mapping[str, Callable[[float], Law]] = {
    "ours": OurLaw,
    "ours, 0.1 % may miss": lambda warm_up_s: OurLaw(warm_up_s, 0.001),
    "HPA, queue": lambda _: QueueLength(QUEUE),
    "llm-d": lambda _: Saturation(),
    "Dynamo": lambda _: Planner(3.0, 0.15),
}


class Job(Struct, frozen=True, kw_only=True):
    day: str
    seed: int
    replicas: int = BEGIN
    law: str = ""  # none: `replicas` serve all the time
    warm_up_s: float = 0.0
    counts: tuple[tuple[float, int], ...] = ()  # a timetable in place of the law


class Outcome(Struct, frozen=True, kw_only=True):
    job: Job
    met: float
    hours: float


def run(job: Job) -> Outcome:
    requests = DAYS[job.day](job.seed)
    scaling = None
    if job.counts:
        table = partial(Timetable, job.counts, job.warm_up_s)
        scaling = Scaling(law=table, most=MOST, warm_up_s=job.warm_up_s)
    elif job.law:
        scaling = Scaling(
            law=partial(LAWS[job.law], job.warm_up_s), most=MOST, warm_up_s=job.warm_up_s
        )
    deployment = Deployment(
        registry.DEFAULT,
        PROFILE,
        job.counts[0][1] if job.counts else job.replicas,
        draft=0.0,
        facts=ReplicaFacts(max_slots=1024),
        scaling=scaling,
    )
    # one that drowns is not served to its end: what has not ended has missed
    options = RunOptions(most_missed=int(DROWNED * len(requests)))
    result = simulate(Traffic(requests, TIERS, job.seed), deployment, options)
    return Outcome(job=job, met=result.met_fraction, hours=result.replica_s / 3600)
